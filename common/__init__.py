"""Modules that every other package may import; they import nothing of the project."""
