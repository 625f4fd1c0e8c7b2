"""Retrievers: dual encoders, trained from pairs of queries and passages, and what asks them."""
