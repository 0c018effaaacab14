"""Speculated: a self-draft is itself speculated for, by the verification that the target's drafts get (TriForce)."""

from __future__ import annotations

import torch

from engine.batch import Batch
from engine.counts import Counts
from engine.drafters.base import Drafter, ModelDrafter, check_gamma
from engine.drafters.self_speculation import SelfSpeculation
from engine.modes import Drafts, Verification
from kv_cache import KVCache, WriteThroughKVCache


class Speculated(Drafter):
    """`inner` drafts for `outer`, which verifies its tokens in one forward and so drafts several at a time for the
    target (Sun et al., TriForce, arXiv 2404.11912, section 4.2).

    What the inner verification lets through, and what it puts in place of the rest, is drawn from the outer draft's own
    distributions, by which the target then accepts it. A round has as many inner ones as would draft its tokens if half
    of the inner drafts stood; a row whose drafts fail more often drafts fewer. What is verified is
    written through to an inner self-draft; a model of its own runs what it lacks, as it does behind any round.

    Errors: ConfigError if gamma + 1 tokens do not fit the inner draft's window.
    """

    def __init__(self, outer: SelfSpeculation, inner: Drafter) -> None:
        self.gamma, self._outer, self._inner, self.parts = outer.gamma, outer, inner, (outer, inner)
        self.refresh_every = outer.refresh_every
        self.runs_missed = isinstance(inner, ModelDrafter) and inner.runs_missed
        self._cache: KVCache | None = getattr(inner, "cache", None)
        self.verification_cache = outer.verification_cache
        if self._cache is not None:
            check_gamma(max(outer.gamma, inner.gamma), self._cache.max_block)
            through = outer.verification_cache
            through.target = WriteThroughKVCache(through.target, self._cache, outer.layers)
        # Of all rows: rounds, drafted, emitted; then how often each draft position was verified, and accepted.
        self._counts = torch.zeros(3 + 2 * inner.gamma, dtype=torch.int64, device=outer.cache.device)

    def propose(self, batch: Batch, verification: Verification, gamma: int) -> Drafts:
        most, rows = self._inner.gamma, torch.arange(len(batch.rows), device=batch.rows.device)[:, None]
        offset = torch.arange(most + 1, device=rows.device)
        n_tokens, probs = torch.zeros_like(batch.lengths), None
        tokens = n_tokens[:, None].repeat(1, gamma + most + 1)
        previous, current, own = batch.previous, batch.current, batch.view_of(self._outer.cache, gamma)
        own.in_order = False  # as positions of a block may repeat
        cache = own if self._cache is None else WriteThroughKVCache(own, batch.view_of(self._cache, gamma))
        n_rounds = -(-2 * gamma // (2 + most))
        for i in range(n_rounds):
            ahead = batch.ahead(n_tokens, previous, current, gamma)
            inner = verification.inner(n_tokens, i, most)
            drafts = self._inner.propose(ahead, inner, most)
            block = torch.cat([current[:, None], drafts.tokens], dim=1)
            # What would lie beyond the round's tokens is all put behind them, where nothing that counts sees it; what
            # was rejected in the last inner round is written over by this one, before it is seen.
            positions = torch.minimum(ahead.lengths[:, None] + offset, batch.lengths[:, None] + gamma)
            logits = self._outer.own.step(block, positions, cache)
            is_open = (n_tokens < gamma).long()
            # The last token of a whole inner round is one that a model of its own has not run: the next round runs it.
            least = most - (self.runs_missed and i == n_rounds - 1)
            meant = torch.full_like(n_tokens, most) if drafts.lengths is None else drafts.lengths
            meant = meant.clamp(max=least)
            meant = torch.minimum(meant, (gamma - 1 - n_tokens).clamp(min=0))

            def decide(inner=inner, drafts=drafts, logits=logits, meant=meant) -> torch.Tensor:
                return torch.stack([*inner.verify(drafts._replace(lengths=meant), logits)])

            accepted, following = self._outer.ranks.decided(decide, 2, len(rows))
            columns = n_tokens[:, None] + offset
            tokens[rows, columns] = torch.where(offset == accepted[:, None], following[:, None], block.roll(-1, 1))
            if inner.verified is not None:
                probs = inner.verified.new_zeros(*tokens.shape, inner.verified.shape[-1]) if probs is None else probs
                probs[rows, columns] = inner.verified
            self._count(is_open * (1 - batch.idle), meant, accepted)
            last = block.gather(1, accepted[:, None]).squeeze(1)
            previous = torch.where(is_open > 0, last, previous)
            current = torch.where(is_open > 0, following, current)
            n_tokens = n_tokens + is_open * (accepted + 1)
        lengths = torch.minimum(n_tokens, self.schedule.bounds(batch, gamma))
        return self.schedule.cut(Drafts(tokens[:, :gamma], None if probs is None else probs[:, :gamma], lengths), batch)

    def _count(self, rounds: torch.Tensor, meant: torch.Tensor, accepted: torch.Tensor) -> None:
        offset = torch.arange(self._inner.gamma, device=meant.device)
        verified_at = (offset <= accepted[:, None]) & (offset < meant[:, None])
        each = [rounds, rounds * meant, rounds * (accepted + 1)]
        each += [rounds @ verified_at.long(), rounds @ (offset < accepted[:, None]).long()]
        self._counts += torch.cat([one.sum(dim=0, keepdim=True) for one in each[:3]] + each[3:])

    def inner_counts(self) -> Counts:
        """Of the inner drafts, all rows as one, since this was asked last."""
        rounds, drafted, emitted, *at = self._counts.tolist()
        self._counts.zero_()
        most = self._inner.gamma
        return Counts(rounds, drafted, emitted, at[:most], at[most:])
