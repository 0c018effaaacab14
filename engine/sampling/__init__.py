"""Sampling: the distribution of the next token, its edits and its random numbers."""

from engine.sampling.distribution import SamplingParams, logits_to_probs
