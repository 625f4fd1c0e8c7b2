"""Models behind HTTP endpoints: allowed addresses and the clients that query them. Torch-free."""
