"""Benchmarks and comparisons, which are run by hand with `make bench`."""
