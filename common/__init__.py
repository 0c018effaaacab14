"""What everything may import; it imports nothing of the project."""
