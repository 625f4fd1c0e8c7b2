"""Soups of policies: rewards of the merged backbones, and quality measures of a front of merges. Pure NumPy."""
