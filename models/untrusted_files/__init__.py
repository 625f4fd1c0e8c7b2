"""Checks of model directories from elsewhere before any library reads them."""
