"""How heads are trained. Imports no torch, so that --help is quick."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How heads are trained."""

    steps: int = 2000  # at most; the learning rate falls as a cosine to their end, or to that of the time
    window: int = 256  # tokens of a text that are looked at together
    windows: int = 4  # of a step
    lr: float = 2e-3  # largest learning rate of AdamW
    depth: int = 3  # draft positions: Medusa heads, and steps that the EAGLE head goes on from its own states
    draft_vocab_size: int = 4096  # tokens that are drafted, the most frequent ones
