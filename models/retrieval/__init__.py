"""Retrievers: dual encoders that are trained on pairs of queries and passages."""
