"""Checks and descriptions of models before anything is loaded, from their configuration and file headers."""
