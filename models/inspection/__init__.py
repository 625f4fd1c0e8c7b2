"""Inspection of models from their configuration and file headers, before anything is loaded."""
