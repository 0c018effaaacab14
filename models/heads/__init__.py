"""Trained heads that draft for a model from its hidden states: Medusa, EAGLE-1, -2 and -3."""
