"""Simulator of worker pools. The real placement policies decide, but the workers are simulated and only consume
time."""
