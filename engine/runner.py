"""ModelRunner: a model and its cache; chunked prefill of a row, and steps of the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from common.errors import ConfigError, UserError, flag
from engine.parallel.ranks import ALONE, ModelRanks, Ranks
from engine.prefix_store import PrefixStore
from kv_cache import FullKVCache, KVCache, ReadOnlyKVCache, WriteThroughKVCache
from kv_cache.base import Prefilled
from kv_cache.entries import LARGEST
from models import ModelConfig, Transformer
from models.attention import MAX_BLOCK
from models.llama import logits_dtype
from models.tensor_parallel import vocab_widths

Value = TypeVar("Value")
# A prefill: yields the number of tokens of every chunk that ran.
Chunks: TypeAlias = Generator[int, None, Value]
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


def run_through(chunks: Chunks[Value]) -> Value:
    """Run all chunks at once; return the generator's value."""
    while True:
        try:
            next(chunks)
        except StopIteration as done:
            return done.value


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
    ) -> None:
        self.model, self.cache, self.ranks, self.prefixes = model, cache, ranks, prefixes
        self.device, self.max_batch, self.vocab_size = cache.device, cache.max_batch, model.config.vocab_size
        self.new_graphs = new_graphs
        self.graphs = None if new_graphs is None else new_graphs(cache.device)
        # Batches and parts that `engine.round` has captured over this model and cache.
        self.captured: dict[tuple[Any, ...], Any] = {}
        self.prefill_chunk = min(prefill_chunk or prefill_chunk_of(cache.device), cache.prefill_block)
        config, keys = model.config, cache.keys
        needed = (model.dtype, config.n_layer, config.n_kv_head, config.head_dim)
        given = (model.dtype if keys.dtype in LARGEST else keys.dtype, keys.shape[0], keys.shape[2], keys.shape[4])
        if needed != given:
            where = "ModelRunner: (dtype, n_layer, n_kv_head, head_dim)"
            fix = "build the cache from model.config, with dtype=model.dtype, or an 8-bit dtype"
            raise ConfigError("the cache does not fit the model", where, given, needed, fix)

    @property
    def narrows(self) -> bool:
        """True if rounds compute no more rows and slots than they need; captured rounds have few shapes."""
        return self.graphs is None

    def n_computed(self, n_busy: int) -> int:
        """Return how many rows a round of `n_busy` rows computes. This is a number that is captured, or at least two:
        libraries compute a product with a single row in another order, and bits would depend on the number of rows."""
        if self.narrows:
            return min(self.max_batch, max(n_busy, 2))
        return next(n for n in captured_sizes(self.max_batch) if n >= n_busy)

    def over(self, cache: KVCache, model: Transformer | None = None) -> ModelRunner:
        """Return a runner of this or another model over another cache, on the same ranks."""
        return ModelRunner(model or self.model, cache, ranks=self.ranks)

    def drop_graphs(self) -> None:
        """Destroy captured rounds with their memory; later rounds are captured anew."""
        if self.graphs is not None:
            self.captured.clear()
            self.graphs.close()

    def prefill_row(self, row: int, prompt: Sequence[int]) -> Prefilled:
        """Fill a row with `prompt` unless it holds it already."""
        return run_through(self.start_prefill(row, prompt)[1])

    def start_prefill(
        self, row: int, prompt: Sequence[int], chunk: int | None = None, reuses: bool = False, tap: Tap = None
    ) -> tuple[int, Chunks[Prefilled]]:
        """Start a prefill: return the number of cached tokens, and a generator of chunks of at most `chunk` tokens.

        reuses: begin behind the first tokens that the row shares with the prompt. They may have been computed in other
        chunks, or by rounds, so that their last bits differ. tap: see `filling`.
        """
        n_shared, n_prompt = self.shared_prefix(row, prompt), len(prompt)
        prefilled = self.cache.prefilled.pop(row, None)
        is_whole = prefilled and prefilled.model is self.model and prefilled.prompt == tuple(prompt)
        if prefilled and is_whole and n_shared in (n_prompt, prefilled.bad_position):
            n_shared = n_prompt
        else:
            prefilled, n_shared = None, min(n_shared, n_prompt - 1) if reuses else 0
        return n_shared, self._prefill(row, prompt, n_shared, prefilled, chunk, tap)

    def copy_prompt(self, source: int, row: int) -> None:
        """Copy the prompt of the `source` row, with the logits behind it, to another row."""
        prefilled = self.cache.prefilled[source]
        self.cache.fill_row(row, self.cache, len(prefilled.prompt), source_row=source)
        self.cache.prefilled[row] = prefilled

    def _prefill(
        self, row: int, prompt: Sequence[int], n_shared: int, prefilled: Prefilled | None, chunk: int | None, tap: Tap
    ) -> Chunks[Prefilled]:
        """Roll the row back to the prompt that it holds, or run the prompt behind its first `n_shared` tokens."""
        if prefilled is not None:
            self._forget_from(row, len(prompt))
            done = replace(prefilled, answer=())
        elif chunk is None and tap is None and n_shared == 0 and (stored := self._take_over(row, prompt)):
            yield len(prompt)
            done = stored
        else:
            hidden, finite = yield from self.filling(row, prompt, n_shared, chunk, tap)
            logits = self.model.logits(hidden)

            def n_finite() -> Tensor:
                """Return the number of positions before the first that is not finite, `[1]`."""
                finite[-1] &= finite_rows(logits)
                return n_shared + finite.long().cumprod(dim=0).sum(dim=0, keepdim=True)

            n = int(self.ranks.decided(n_finite, 1))
            done = Prefilled(self.model, tuple(prompt), logits, n if n < len(prompt) else None)
            if self.prefixes and chunk is None and n_shared == 0:
                self.prefixes.save(self.cache, row, prompt, done.logits, done.bad_position)
        self.cache.prefilled[row] = done
        return done

    def _take_over(self, row: int, prompt: Sequence[int]) -> Prefilled | None:
        """Fill a row with a prompt that an earlier run has prefilled; None unless every rank has its part."""
        if self.prefixes is None:
            return None
        self.cache.reset_row(row)
        found = self.prefixes.load(self.cache, row, prompt)
        is_everywhere = all(self.ranks.gathered(found is not None))
        return Prefilled(self.model, tuple(prompt), *found) if found and is_everywhere else None

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
        """Record the answer, the tokens that a row holds behind its prompt."""
        if prefilled := self.cache.prefilled.get(row):
            self.cache.prefilled[row] = replace(prefilled, answer=tuple(answer))

    def _forget_from(self, row: int, length: int) -> None:
        self.cache.view(slice(row, row + 1)).rollback(torch.tensor([length], device=self.device))

    def fill_row(self, row: int, prompt: Sequence[int], n_known: int = 0) -> tuple[Tensor, Tensor]:
        """Run all chunks of `filling`, and return its result."""
        return run_through(self.filling(row, prompt, n_known))

    def filling(
        self, row: int, prompt: Sequence[int], n_known: int = 0, chunk: int | None = None, tap: Tap = None
    ) -> Chunks[tuple[Tensor, Tensor]]:
        """Run `prompt` into a row behind its first `n_known` tokens, which the row keeps. tap: called behind each
        chunk with its first position and hidden states `[n, dim]`.

        Returns the last token's hidden state `[dim]`, and whether each state that was computed is finite, `[n]` bool.
        """
        cache, n_token = self.cache, len(prompt)
        if cache.selects and n_token > cache.capacity:
            # Run the prompt over a full cache, then select entries from that.
            whole = FullKVCache(self.model.config, 1, n_token, cache.device, cache.keys.dtype)
            runner = self.over(whole)
            result = yield from runner.filling(0, prompt, chunk=chunk, tap=tap)
            queries = runner.last_queries(0, prompt, cache.n_queries) if cache.n_queries else None
            cache.fill_row(row, whole, n_token, queries=queries, source_row=0)
            return result
        if n_known:
            self._forget_from(row, n_known)
        else:
            cache.reset_row(row)
        tokens = torch.tensor(prompt, device=self.device)[None]
        positions = torch.arange(n_token, device=self.device)[None]
        finite, n_run = [], min(self.prefill_chunk, chunk or n_token)
        for start in range(n_known, n_token, n_run):
            end = min(start + n_run, n_token)
            view = cache.view(slice(row, row + 1), end, block_at_end=True)
            hidden = self.model.hidden(tokens[:, start:end], positions[:, start:end], view)
            finite.append(finite_rows(hidden[0]))
            if tap is not None:
                tap(start, hidden[0])
            yield end - start
        return hidden[0, -1], torch.cat(finite)

    def fill_rows(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Run prompts into their rows, together where the cache has room for short blocks only."""
        if self.cache.in_order or self.cache.selects:
            for row, prompt in prompts.items():
                self.fill_row(row, prompt)
            return
        for row in prompts:
            self.cache.reset_row(row)
        self._run_blocks({row: (prompt, 0) for row, prompt in prompts.items()}, self.prefill_chunk)

    def extend_rows(self, behind: Mapping[int, tuple[Sequence[int], int]]) -> None:
        """Append to each row the tokens of its text that the cache lacks: in a round's blocks, or in chunks of a single
        row where these are fewer forwards. behind: by row, the text, and how many of its first tokens the row holds."""
        n_alike = Counter(len(text) - n_known for text, n_known in behind.values())
        together = {}
        for row, (text, n_known) in behind.items():
            n_missed = len(text) - n_known
            if n_alike[n_missed] * MAX_BLOCK < n_missed and not self.cache.selects:
                self.fill_row(row, text, n_known)
            else:
                together[row] = text, n_known
        self._run_blocks(together, min(self.prefill_chunk, MAX_BLOCK))

    def _run_blocks(self, behind: Mapping[int, tuple[Sequence[int], int]], block: int) -> None:
        """Append to each row the tokens that it lacks, in blocks that do not depend on the other rows. The first blocks
        of all rows run together if they are equally long, then the second blocks, and so on, no more tokens at once
        than a chunk of a prompt has."""
        forwards: dict[tuple[int, int], list[tuple[int, range]]] = {}
        for row, (text, n_known) in behind.items():
            for i, start in enumerate(range(n_known, len(text), block)):
                at = range(start, min(start + block, len(text)))
                forwards.setdefault((i, len(at)), []).append((row, at))
        for (_, n_token), blocks in sorted(forwards.items()):
            n_row = max(1, prefill_chunk_of(self.device) // n_token)
            for first in range(0, len(blocks), n_row):
                some = blocks[first : first + n_row]
                texts = [[behind[row][0][p] for p in at] for row, at in some]
                given = [row for row, _ in some], texts, [[*at] for _, at in some]
                rows, tokens, positions = (torch.tensor(x, device=self.device) for x in given)
                self.model.hidden(tokens, positions, self.cache.view(rows, max(at.stop for _, at in some)))

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
        tokens, positions = torch.tensor([[text[p] for p in at], [*at]], device=self.device)[:, None]
        view = ReadOnlyKVCache(self.cache.view(slice(row, row + 1), at.stop, block_at_end=True))
        _, states = self.model.hidden_states(tokens, positions, view, layers)
        return states, view.queries

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

    def _skip(self, *given: object) -> None:
        """Do nothing: only ranks that hold the model fill its cache."""

    fill_rows = extend_rows = _skip

    def last_logits(self, tokens: Tensor, positions: Tensor, cache: object = None) -> Tensor:
        """Return the logits `[B, V]` that the holders gather; they are empty on ranks that do not decide."""
        widths = vocab_widths(self.vocab_size, len(self.holders.ranks))
        where = tokens.device
        nothing = torch.zeros(len(tokens), max(widths), dtype=logits_dtype(self.dtype, where), device=where)
        return self.holders.gather(nothing, widths) if self.ranks.leads else nothing[:, :0]
