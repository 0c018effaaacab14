"""Speculated: a self-draft that has a draft, which it verifies as the target verifies its drafts (TriForce)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.drafters.base import Drafter, RowUpdate, check_gamma
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.self_speculation import SelfSpeculation
from engine.modes import Drafts, Verification
from engine.runner import ModelRunner
from engine.stats import Counts
from kv_cache import KVCache, WriteThroughKVCache


class Speculated(Drafter):
    """Lets `inner` draft for `outer`, which verifies its tokens in one forward and so drafts several at a time for the
    target (Sun et al., TriForce, arXiv 2404.11912, section 4.2).

    Tokens that the inner verification accepts or adds have the outer draft's distributions, by which the target then
    accepts them. There are as many inner rounds as give a round's tokens if half of the inner drafts are accepted; a
    row whose inner drafts fail more often drafts fewer. Verified tokens are written through to an inner self-draft; an
    inner model catches up on them, as after any round.

    Errors: ConfigError if gamma + 1 tokens do not fit the inner draft's window.
    """

    def __init__(self, outer: SelfSpeculation, inner: Drafter) -> None:
        self.gamma, self.refresh_every = outer.gamma, outer.refresh_every
        self._outer, self._inner, self.parts = outer, inner, (outer, inner)
        self._cache: KVCache | None = None
        if isinstance(inner, SelfSpeculation):
            self._cache = inner.cache
            check_gamma(max(outer.gamma, inner.gamma), self._cache.max_block)
            through = outer.write_through
            through.target = WriteThroughKVCache(through.target, self._cache, outer.layers)
        self.is_written_through = not isinstance(inner, ModelDrafter) or self._cache is not None
        # Sums over all rows: rounds, drafted, emitted; then by draft position how often verified, and accepted.
        self._counts = torch.zeros(3 + 2 * inner.gamma, dtype=torch.int64, device=outer.cache.device)

    def check(self, target: ModelRunner, length: int) -> None:
        for part in self.parts:
            part.check(target, length)

    def follow(self, rows: Sequence[RowUpdate]) -> None:
        for part in self.parts:
            part.follow(rows)

    def rollback(self, batch: Batch) -> None:
        for part in self.parts:
            part.rollback(batch)
        super().rollback(batch)

    def verified_cache(self, observe: bool) -> WriteThroughKVCache:
        return self._outer.verified_cache(observe)

    def refresh(self, batch: Batch, gamma: int) -> None:
        self._outer.refresh(batch, gamma)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        most, rows = self._inner.gamma, torch.arange(len(batch.rows), device=batch.rows.device)[:, None]
        offset = torch.arange(most + 1, device=rows.device)
        n_tokens, probs = torch.zeros_like(batch.lengths), None
        tokens = n_tokens[:, None].repeat(1, gamma + most + 1)
        previous, current, outer_view = batch.previous, batch.current, batch.view_of(self._outer.cache, gamma)
        outer_view.in_order = False  # positions of a block may repeat
        cache = outer_view
        if self._cache is not None:
            cache = WriteThroughKVCache(outer_view, batch.view_of(self._cache, gamma))
        n_rounds = -(-2 * gamma // (2 + most))
        for i in range(n_rounds):
            ahead = batch.ahead(n_tokens, previous, current, gamma)
            inner = verification.inner(n_tokens, i, most)
            drafts = self._inner.propose(ahead, inner, most)
            block = torch.cat([current[:, None], drafts.tokens], dim=1)
            # Positions beyond the round's tokens are all put behind these, where no token that counts sees them. This
            # inner round overwrites the rejected tokens of the last before a query sees them.
            positions = torch.minimum(ahead.lengths[:, None] + offset, batch.lengths[:, None] + gamma)
            logits = self._outer.runner.step(block, positions, cache)
            is_open = (n_tokens < gamma).long()
            # An inner model has not run the last token of a whole inner round: the next round runs it.
            least = most - (not self.is_written_through and i == n_rounds - 1)
            lengths = torch.full_like(n_tokens, most) if drafts.lengths is None else drafts.lengths
            lengths = torch.minimum(lengths.clamp(max=least), (gamma - 1 - n_tokens).clamp(min=0))

            def decide(inner=inner, drafts=drafts, logits=logits, lengths=lengths) -> Tensor:
                return torch.stack([*inner.verify(drafts._replace(lengths=lengths), logits)])

            accepted, following = self._outer.runner.ranks.decided(decide, 2, len(rows))
            columns = n_tokens[:, None] + offset
            tokens[rows, columns] = torch.where(offset == accepted[:, None], following[:, None], block.roll(-1, 1))
            if inner.verified is not None:
                probs = inner.verified.new_zeros(*tokens.shape, inner.verified.shape[-1]) if probs is None else probs
                probs[rows, columns] = inner.verified
            self._count(is_open * (1 - batch.idle), lengths, accepted)
            last = block.gather(1, accepted[:, None]).squeeze(1)
            previous = torch.where(is_open > 0, last, previous)
            current = torch.where(is_open > 0, following, current)
            n_tokens = n_tokens + is_open * (accepted + 1)
        lengths = torch.minimum(n_tokens, self.schedule.bounds(batch, gamma))
        return self.schedule.cut(Drafts(tokens[:, :gamma], None if probs is None else probs[:, :gamma], lengths), batch)

    def _count(self, rounds: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        offset = torch.arange(self._inner.gamma, device=lengths.device)
        accepted_at = offset < accepted[:, None]
        verified_at = (offset <= accepted[:, None]) & (offset < lengths[:, None])
        sums = torch.stack([rounds, lengths, accepted + 1], dim=1)
        self._counts += (rounds[:, None] * torch.cat([sums, verified_at, accepted_at], dim=1)).sum(dim=0)

    def inner_counts(self) -> Counts:
        """Return the acceptance counts of the inner draft since the last call, summed over rows."""
        rounds, drafted, emitted, *at = self._counts.tolist()
        self._counts.zero_()
        most = self._inner.gamma
        return Counts(rounds, drafted, emitted, at[:most], at[most:])
