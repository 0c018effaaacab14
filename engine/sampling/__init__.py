"""Sampling: the distribution of the next token, its edits, its random numbers, and the verification of drafts."""

from engine.sampling.distribution import SamplingParams, logits_to_probs
