"""What decides the next trial."""
