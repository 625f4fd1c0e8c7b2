"""Models described by their configuration and the headers of their files, before anything is loaded."""
