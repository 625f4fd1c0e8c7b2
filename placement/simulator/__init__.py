"""Simulated pools: the controllers that decide about real workers decide here about workers that only take time."""
