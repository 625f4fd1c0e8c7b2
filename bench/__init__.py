"""Measurements and comparisons, run by hand: `make bench`."""
