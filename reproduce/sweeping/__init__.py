"""Sweeps: many configurations of one script, each in a process of its own and recorded once, resumable at any point."""
