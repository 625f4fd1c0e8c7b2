"""Soups of policies: how backbones mix rewards, and what a front of merges is worth. Pure NumPy."""
