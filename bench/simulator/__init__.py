"""Simulator of worker pools. Decisions are made by the real placement policies, but the simulated workers only consume
time."""
