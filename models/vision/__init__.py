"""Policies that see: what they make of images, and how their towers are run."""
