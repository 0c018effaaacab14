"""Drafters with tiny random heads, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine import ModelRunner
from engine.drafters.dflash import DFlash
from engine.drafters.eagle import Eagle
from engine.drafters.head_drafter import HeadDrafter
from kv_cache import KVCache
from kv_cache.base import KVShape
from models import ModelConfig
from models.heads.dflash import DFlashHead
from tests.support.published_heads import random_dflash, random_eagle

MASK = 2


def whole_dflash(target: KVShape, **options: Any) -> DFlashHead:
    """Return a DFlash head that borrows nothing, and has two of three of the target's ids."""
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 3 != 2])
    head = random_dflash(target, draft_vocab_size=len(ids), has_embedding=True, **options)
    head.target_ids = ids
    return head


HEADS: dict[str, tuple[type[HeadDrafter], Callable[..., Any]]] = {
    "eagle-1": (Eagle, partial(random_eagle, version=1)),
    "eagle-3": (Eagle, random_eagle),
    "P-EAGLE": (Eagle, partial(random_eagle, mask_token=MASK)),
    "dflash": (DFlash, random_dflash),
    "dflash, whole": (DFlash, whole_dflash),
    "dspark, whole": (DFlash, partial(whole_dflash, drafts_anchor=True, markov_rank=5, markov_kind="rnn")),
    "dflash 2": (DFlash, partial(random_dflash, selector_rank=4, selector_top_k=9, n_tap=2, conv_group=8)),
}


def with_head(
    kind: str, runner: ModelRunner, new_cache: Callable[[ModelConfig], KVCache], gamma: int, **options: Any
) -> HeadDrafter:
    """Return a drafter with a head of one of HEADS. options: of the function that makes the head."""
    made, make = HEADS[kind]
    head = make(runner.model.config, **options).to(runner.device)
    return made(runner, head, new_cache(head.body.config), gamma)
