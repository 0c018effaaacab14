"""ModelRunner: a model and its cache. `Prefill` runs a prompt into a row; `step` runs a block of every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from common.errors import UserError, flag, refuse
from engine.graphs import CapturedParts
from engine.parallel.ranks import ALONE, Ranks
from engine.prefix_store import PrefixStore
from engine.sampling.distribution import NO_FILTERS, Filters
from kv_cache import FullKVCache, KVCache, ReadOnlyKVCache, WriteThroughKVCache
from kv_cache.base import Prefilled
from kv_cache.entries import LARGEST
from models import Transformer
from models.attention import MAX_BLOCK

Items = TypeVar("Items", list[Any], range)
# Called after each chunk of a prompt with its first position and its hidden states `[n, dim]`.
Tap: TypeAlias = Callable[[int, Tensor], None] | None
# Long enough to keep matmuls busy, short enough that a chunk's mask and activations stay small. On a GPU the kernels
# of a chunk should take longer than the host takes to launch them: for an 8B model on 8 ranks an estimated 10 to 14 ms.
CPU_PREFILL_CHUNK, GPU_PREFILL_CHUNK = 512, 4096


def finite_rows(x: Tensor) -> Tensor:
    """Return whether every entry along the last dimension is finite: `[..., V] -> [...]` bool, in one pass."""
    return torch.isfinite(x.sum(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)))


def not_finite(where: str, seen: str) -> UserError:
    """Return the error for logits that are not finite."""
    required = "finite logits at every position of every row"
    fix = f"check the checkpoint (convert again), or use a wider {flag('dtype')} (float32)"
    return UserError("the model's logits are not finite", where, seen, required, fix)


def _parts(items: Items, n: int) -> list[Items]:
    """Cut a sequence into parts of `n` items; the last may be shorter."""
    return [items[first : first + n] for first in range(0, len(items), n)]


def prefill_chunk_of(device: torch.device) -> int:
    """Return how many tokens of a prompt run at once, if the cache has room for them."""
    return CPU_PREFILL_CHUNK if device.type == "cpu" else GPU_PREFILL_CHUNK


def captured_sizes(max_batch: int) -> list[int]:
    """Return the numbers of rows that captured rounds are made for, ascending: powers of two, and `max_batch`."""
    return [*(1 << i for i in range((max_batch - 1).bit_length())), max_batch]


class ModelRunner:
    """Runs `model` over `cache`. Every forward of the engine goes through here.

    A row that still holds a prompt is rolled back to it instead of running it again, so that a baseline and a
    speculation decode from the same state. ranks: the processes that make the same calls, where the model is sharded.
    new_graphs: makes `CudaGraphs`, where rounds are captured. prefixes: prompts that earlier runs have prefilled.
    fewest_rows: of a round, in which a row has the bits that it has next to more rows (`models.kernels.row_bits`).
    Errors: ConfigError if dtype and shape of the cache are not the model's.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        prefill_chunk: int | None = None,
        ranks: Ranks = ALONE,
        new_graphs: Callable[[torch.device], Any] | None = None,
        prefixes: PrefixStore | None = None,
        fewest_rows: int = 2,
    ) -> None:
        self.model, self.cache, self.ranks, self.prefixes = model, cache, ranks, prefixes
        self._fewest_rows = fewest_rows
        self.device, self.max_batch, self.vocab_size = cache.device, cache.max_batch, model.config.vocab_size
        self.graphs = None if new_graphs is None else CapturedParts(new_graphs(cache.device), ranks)
        self.prefill_chunk = min(prefill_chunk or prefill_chunk_of(cache.device), cache.prefill_block)
        config, keys = model.config, cache.keys
        needed = (model.dtype, config.n_layer, config.n_kv_head, config.head_dim)
        given = (model.dtype if keys.dtype in LARGEST else keys.dtype, keys.shape[0], keys.shape[2], keys.shape[4])
        if needed != given:
            where, what = "ModelRunner: (dtype, n_layer, n_kv_head, head_dim)", "the cache does not fit the model"
            refuse(where, given, needed, what, "build the cache from model.config, with dtype=model.dtype, or 8 bits")

    @property
    def narrows(self) -> bool:
        """True if rounds compute no more rows and slots than they need; captured rounds have few shapes."""
        return self.graphs is None

    def n_computed(self, n_busy: int, filters: Filters = NO_FILTERS) -> int:
        """Return how many rows a round of `n_busy` rows, which sample by `filters`, computes. This is a number that is
        captured, or at least `fewest_rows`, and 2 where PyTorch adds up probabilities."""
        if self.narrows:
            fewest = 2 if self._fewest_rows > 1 or filters.adds_up else 1
            return min(self.max_batch, max(n_busy, fewest))
        return next(n for n in captured_sizes(self.max_batch) if n >= n_busy)

    def over(self, cache: KVCache, model: Transformer | None = None) -> ModelRunner:
        """Return a runner of this or another model over another cache, on the same ranks."""
        return ModelRunner(model or self.model, cache, ranks=self.ranks)

    def drop_graphs(self) -> None:
        """Destroy captured rounds with their memory; later rounds are captured anew."""
        if self.graphs is not None:
            self.graphs.drop()

    def prefill(self, row: int, prompt: Sequence[int]) -> Prefilled:
        """Fill a row with `prompt` unless it holds it already."""
        prefill = Prefill(self, row, prompt)
        while prefill.n_left:
            prefill.run_chunk()
        return prefill.finish()

    def copy_prompt(self, source: int, row: int) -> None:
        """Copy the prompt of the `source` row, with the logits after it, to another row."""
        prefilled = self.cache.prefilled[source]
        self.cache.fill_row(row, self.cache, len(prefilled.prompt), source_row=source)
        self.cache.prefilled[row] = prefilled

    def shared_prefix(self, row: int, prompt: Sequence[int]) -> int:
        """Return how many first tokens of the prompt the row holds."""
        prefilled = self.cache.prefilled.get(row)
        if prefilled is None or prefilled.model is not self.model:
            return 0
        pairs = zip(prefilled.prompt + prefilled.answer, prompt, strict=False)
        n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        positions = self.cache.view(slice(row, row + 1)).positions[0, :n]
        n = int((positions == torch.arange(n, device=self.device)).cumprod(dim=0).sum())
        return n if prefilled.bad_position is None else min(n, prefilled.bad_position)

    def keep_answer(self, row: int, answer: Sequence[int]) -> None:
        """Record the answer, the tokens that a row holds after its prompt."""
        if prefilled := self.cache.prefilled.get(row):
            self.cache.prefilled[row] = replace(prefilled, answer=tuple(answer))

    def cut(self, row: int, length: int) -> None:
        """Forget a row's entries at positions >= `length`, or with 0 all that the row holds."""
        if length == 0:
            self.cache.reset_row(row)
        else:
            self.cache.view(slice(row, row + 1)).rollback(torch.tensor([length], device=self.device))

    def run_chunk(self, row: int, text: Sequence[int], at: range) -> Tensor:
        """Run the tokens of `text` at positions `at` into a row; return their hidden states `[n, dim]`."""
        tokens, positions = self._block(text, at)
        return self.model.hidden(tokens, positions, self.cache.view(slice(row, row + 1), at.stop, block_at_end=True))[0]

    def extend_row(self, row: int, text: Sequence[int], n_cached: int = 0) -> None:
        """Run `text` into a row after its first `n_cached` tokens, which the row keeps."""
        cache = self.cache
        if cache.selects and len(text) > cache.capacity:
            # Run the text over a full cache, then select entries from that.
            whole = self.over(FullKVCache(self.model.config, 1, len(text), cache.device, cache.keys.dtype))
            whole.extend_row(0, text)
            queries = whole.last_queries(0, text, cache.n_queries) if cache.n_queries else None
            cache.fill_row(row, whole.cache, len(text), queries=queries, source_row=0)
            return
        self.cut(row, n_cached)
        for at in _parts(range(n_cached, len(text)), self.prefill_chunk):
            self.run_chunk(row, text, at)

    def extend(self, texts: Mapping[int, tuple[Sequence[int], int]]) -> None:
        """Append to each row the tokens of its text that the cache lacks. texts: by row, the text, and how many of its
        first tokens the row holds; with 0 the row is filled anew.

        A row runs alone in chunks if it is new and the cache has room for long blocks, or if that takes fewer forwards.
        Other rows run in blocks that do not depend on each other: the first blocks of all rows together if they are
        equally long, then the second blocks, and so on, no more tokens at once than a chunk has.
        """
        cache, forwards = self.cache, dict[tuple[int, int], list[tuple[int, list[int], list[int]]]]()
        n_alike = Counter(len(text) - n_cached for text, n_cached in texts.values())
        for row, (text, n_cached) in texts.items():
            n_missed = len(text) - n_cached
            is_shorter_alone = n_alike[n_missed] * MAX_BLOCK < n_missed and not cache.selects
            if is_shorter_alone if n_cached else cache.in_order or cache.selects:
                self.extend_row(row, text, n_cached)
                continue
            if n_cached == 0:
                cache.reset_row(row)
            block = min(self.prefill_chunk, MAX_BLOCK) if n_cached else self.prefill_chunk
            for i, at in enumerate(_parts(range(n_cached, len(text)), block)):
                forwards.setdefault((i, len(at)), []).append((row, [text[p] for p in at], [*at]))
        for (_, n_token), blocks in sorted(forwards.items()):
            for some in _parts(blocks, max(1, prefill_chunk_of(self.device) // n_token)):
                rows, tokens, positions = (torch.tensor(x, device=self.device) for x in zip(*some, strict=True))
                extent = 1 + max(at[-1] for *_, at in some)
                self.model.hidden(tokens, positions, cache.view(rows, extent))

    def last_queries(self, row: int, text: Sequence[int], n: int) -> list[Tensor]:
        """Return the queries of the last `n` tokens of `text`, which the row holds: `[n_head, n, head_dim]`."""
        _, queries = self.recompute(row, text, range(len(text) - n, len(text)))
        return [layer[0].transpose(0, 1) for layer in queries]

    def recompute(
        self, row: int, text: Sequence[int], at: range, layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Recompute hidden states and queries of cached positions without writing.

        Returns the states `[1, n, ...]` (see `Transformer.hidden_states`) of the tokens of `text` at positions `at`,
        and each layer's queries `[1, n, n_head, head_dim]`.
        """
        tokens, positions = self._block(text, at)
        view = ReadOnlyKVCache(self.cache.view(slice(row, row + 1), at.stop, block_at_end=True))
        _, states = self.model.hidden_states(tokens, positions, view, layers)
        return states, view.queries

    def _block(self, text: Sequence[int], at: range) -> Tensor:
        """Return the tokens of `text` at positions `at`, and these positions, `[2, 1, n]`."""
        return torch.tensor([[text[p] for p in at], [*at]], device=self.device)[:, None]

    def step(self, tokens: Tensor, positions: Tensor, cache: KVCache | WriteThroughKVCache | None = None) -> Tensor:
        """Return logits `[B, T, V]` of `tokens [B, T]` at `positions [B, T]`; they are empty on ranks that do not
        decide. cache: a view of the runner's cache, which may also write to a draft's."""
        return self.model(tokens, positions, cache or self.cache)

    def step_with_states(
        self, tokens: Tensor, positions: Tensor, cache: KVCache | WriteThroughKVCache, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return what `step` returns, the last hidden states, and the inputs of each of `layers` (see
        `Transformer.hidden_states`), each `[B, T, dim]`."""
        hidden, states = self.model.hidden_states(tokens, positions, cache, layers)
        inputs = states.chunk(len(layers), dim=-1) if layers else ()
        return self.model.logits(hidden), hidden, dict(zip(layers, inputs, strict=True))

    def last_logits(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the logits `[B, V]` that follow the last of `tokens [B, T]`."""
        return self.model.logits(self.model.hidden(tokens, positions, cache or self.cache)[:, -1])


class Prefill:
    """Runs a prompt into a row of a runner's cache: `run_chunk` while `n_left`, then `finish`.

    A row that holds the whole prompt only forgets what follows it. reuses: begin after the first tokens that the row
    shares with the prompt, `n_reused` of them. They may have been computed in other chunks, or by rounds, so that their
    last bits differ. chunk: the most tokens of a chunk; None: as many as the runner takes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        row: int,
        prompt: Sequence[int],
        chunk: int | None = None,
        reuses: bool = False,
        tap: Tap = None,
    ) -> None:
        self._runner, self._row, self._prompt, self._tap = runner, row, prompt, tap
        n_shared, before = runner.shared_prefix(row, prompt), runner.cache.prefilled.pop(row, None)
        is_whole = before and before.model is runner.model and before.prompt == tuple(prompt)
        self._done: Prefilled | None = None
        if before and is_whole and n_shared in (len(prompt), before.bad_position):
            n_shared, self._done = len(prompt), replace(before, answer=())
        elif not reuses:
            n_shared = 0
        self.n_reused = n_shared if self._done else min(n_shared, len(prompt) - 1)
        self.n_left, self._finite = len(prompt) - self.n_reused, list[Tensor]()
        runner.cut(row, self.n_reused)
        self._chunk = min(runner.prefill_chunk, chunk or len(prompt))
        self._is_stored = runner.prefixes is not None and chunk is None and self.n_reused == 0

    def run_chunk(self) -> int:
        """Run the next tokens of the prompt, or take all over from an earlier run; return how many these are."""
        start = len(self._prompt) - self.n_left
        at = range(start, start + min(self._chunk, self.n_left))
        if start == 0 and self._is_stored and self._tap is None and self._take_over():
            at = range(len(self._prompt))
        else:
            hidden = self._runner.run_chunk(self._row, self._prompt, at)
            self._finite.append(finite_rows(hidden))
            self._last = hidden[-1]
            if self._tap is not None:
                self._tap(start, hidden)
        self.n_left -= len(at)
        return len(at)

    def _take_over(self) -> bool:
        """Fill the row with a prompt that an earlier run has prefilled; False unless every rank has its part."""
        runner, prompt = self._runner, self._prompt
        found = runner.prefixes.load(runner.cache, self._row, prompt) if runner.prefixes else None
        is_everywhere = all(runner.ranks.all_gather_object(found is not None))
        if found and is_everywhere:
            self._done, self._is_stored = Prefilled(runner.model, tuple(prompt), *found), False
        else:
            runner.cache.reset_row(self._row)
        return self._done is not None

    def finish(self) -> Prefilled:
        """Compute the logits after the prompt, once all chunks have run; return them with the prompt."""
        runner, prompt = self._runner, self._prompt
        if self._done is None:
            logits = runner.model.logits(self._last)

            def n_finite() -> Tensor:
                """Return the number of positions before the first that is not finite, `[1]`."""
                self._finite[-1][-1] &= finite_rows(logits)
                return self.n_reused + torch.cat(self._finite).long().cumprod(dim=0).sum(dim=0, keepdim=True)

            n = int(runner.ranks.broadcast(n_finite, 1))
            self._done = Prefilled(runner.model, tuple(prompt), logits, n if n < len(prompt) else None)
            if runner.prefixes and self._is_stored:
                runner.prefixes.save(runner.cache, self._row, prompt, logits, self._done.bad_position)
        runner.cache.prefilled[self._row] = self._done
        return self._done
