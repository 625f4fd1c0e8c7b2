"""Simulator of worker pools, in which the real placement policies decide about workers that only consume time."""
