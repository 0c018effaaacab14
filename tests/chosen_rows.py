"""Ragged rows of a self-draft whose policy, verify_topk or retrieval, chooses entries anew after rounds."""

import torch
from tiny import TINY, full_cache, random_prompts, tiny_model

from engine import ModelRunner, SelfSpeculation
from engine.batch import Batch
from engine.drafters import RowUpdate
from engine.round import Round
from engine.sampling import Filters
from kv_cache.retrieval import Retrieval, RetrievalKVCache
from kv_cache.verify_topk import VerifyTopK, VerifyTopKCache

GAMMA, WINDOW, BUDGET, N_FIRST, CHUNK = 3, 6, 16, 2, 3
CHOSEN, LONGEST = BUDGET - WINDOW, 100
LENGTHS = [40, 9, 29, 53]


def topk_cache(config=TINY, n_rows: int = len(LENGTHS), dtype=torch.float64, **options) -> VerifyTopKCache:
    options = {"snapkv_window": WINDOW, "n_sink": N_FIRST, "refresh": 1} | options
    return VerifyTopKCache(config, n_rows, VerifyTopK(BUDGET, **options), "cpu", dtype)


def retrieval_cache(config=TINY, dtype=torch.float64, **options) -> RetrievalKVCache:
    options = {"snapkv_window": WINDOW, "n_sink": N_FIRST, "refresh": 1, "chunk": CHUNK} | options
    policy = Retrieval(BUDGET, **options)
    return RetrievalKVCache(config, len(LENGTHS), LONGEST, policy, "cpu", dtype)


class Rows:
    """Ragged rows of a self-draft, and rounds over some of them, after which entries are chosen anew."""

    choosing = True

    def __init__(self, cache: VerifyTopKCache, model=None, kv_dtype=None, draft=(None, None)) -> None:
        self.model, self.texts = model or tiny_model(), random_prompts(LENGTHS)
        self.runner = ModelRunner(self.model, full_cache(self.model, len(LENGTHS), kv_dtype=kv_dtype))
        self.cache, self.batch = cache, Batch(len(LENGTHS), Filters())
        self.drafter = SelfSpeculation(self.runner, cache, GAMMA, *draft)
        for row in range(len(LENGTHS)):
            self.fill(row)
        # The KV of each row's last token is not in the cache yet.
        self.current = [5, 6, 7, 8]

    def fill(self, row: int) -> None:
        self.runner.prefill_row(row, self.texts[row])
        self.drafter.follow([RowUpdate(row, row, self.texts[row], 0)])

    def round(self, n_accepted: list[int], rows: list[int] | None = None, gamma: int = GAMMA) -> None:
        """Verify a block in each row; `n_accepted` drafts are accepted, and entries are chosen anew."""
        rows = list(range(len(LENGTHS))) if rows is None else rows
        batch = self.batch.first(len(rows))
        batch.rows.copy_(torch.tensor(rows))
        batch.set_state([len(self.texts[row]) for row in rows], [0] * len(rows), [self.current[row] for row in rows])
        drafts = torch.arange(gamma) + torch.tensor(rows)[:, None] * 3
        block = torch.cat([batch.current[:, None], drafts], dim=1)
        Round(self.runner, batch, self.drafter, gamma, "greedy").forward(block)
        for place, row in enumerate(rows):
            self.texts[row] = [*self.texts[row], *block[place, : 1 + n_accepted[place]].tolist()]
        batch.set_state([len(self.texts[row]) for row in rows], [0] * len(rows), [1] * len(rows))
        self.runner.cache.rollback(torch.tensor([len(text) for text in self.texts]))
        self.drafter.rollback(batch)
        if self.choosing:
            self.drafter.refresh(batch, gamma)
