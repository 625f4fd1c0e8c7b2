"""What is refused of a model directory before any library reads it."""
