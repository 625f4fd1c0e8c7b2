"""Comparisons with other trainers and engines, run by hand."""
