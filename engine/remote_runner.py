"""RemoteRunner: stands for the runner of a draft model on ranks that do not hold it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.parallel.ranks import Ranks
from models import ModelConfig
from models.llama import logits_dtype
from models.tensor_parallel import ModelRanks


@dataclass(frozen=True)
class RemoteRunner:
    """Stands for the ModelRunner of a model that other ranks hold: the same calls, no weights and no cache."""

    config: ModelConfig
    dtype: torch.dtype
    max_batch: int
    ranks: Ranks
    holders: ModelRanks
    cache: ClassVar[None] = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def extend(self, texts: object) -> None:
        """Do nothing: only ranks that hold the model fill its cache."""

    def last_logits(self, tokens: Tensor, positions: Tensor, cache: object = None) -> Tensor:
        """Return the logits `[B, V]` that the holders gather; they are empty on ranks that do not decide."""
        where = tokens.device
        nothing = torch.zeros(len(tokens), 0, dtype=logits_dtype(self.dtype, where), device=where)
        return self.holders.gather(nothing, self.vocab_size) if self.ranks.leads else nothing
