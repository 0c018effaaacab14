"""Trained heads that draft for a model from its hidden states: Medusa, EAGLE and DFlash."""
