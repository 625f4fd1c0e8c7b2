"""Models behind HTTP endpoints: where they may be, and how they are asked. Torch-free."""
