"""The Transformer of every Llama-family model. The cache is an argument; nothing here knows of drafts or policies."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache.entries import KV
from models.attention import AttentionBackend, AttentionSpec, Slots, TorchAttention
from models.config import ModelConfig
from models.experts import StackedExperts, route
from models.kernels.pointwise import EAGER, HeadNorm, Pointwise, norm_heads
from models.rope import Rope, Rotation, rope_of, rotate, rotation

# Prepares attention for each layer from the positions `[B, T]` of a block, the slots, and the dtype.
See: TypeAlias = Callable[[Tensor, Slots, torch.dtype], Sequence[Any]]


@dataclass(frozen=True)
class Step:
    """The inputs that all layers of a forward share."""

    cache: Slots
    slots: Any  # where the cache writes the block's tokens
    backend: AttentionBackend
    visible: Sequence[Any]  # for each layer, prepared by the backend from positions
    rotation: Rotation  # of the block's tokens, `[B * T]`
    slot_rotation: Rotation | None  # of the slots, `[B, C]`, if the cache stores keys un-rotated
    pointwise: Pointwise
    block_shape: torch.Size


class Linear(nn.Linear):
    """A linear layer without initialisation on the meta device, which would import 80 MB of Python."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Head(Linear):
    """The layer that computes logits, in `logits_dtype`."""

    def forward(self, x: Tensor) -> Tensor:
        return to_logits(x, self.weight)


class Embedding(nn.Embedding):
    """An embedding without initialisation on the meta device."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class QueryKeyNorm(nn.Module):
    """The RMSNorm of every query head and every key head; `weight [2 * head_dim]`: first of queries, then of keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * config.head_dim))
        self._n_query_head, self._eps = config.n_head, config.norm_eps

    def norm(self) -> HeadNorm:
        return HeadNorm(self.weight.view(2, -1), self._n_query_head, self._eps)


class Attention(nn.Module):
    """Attention of a layer, with rotary embedding of queries and keys if `is_rotated`."""

    def __init__(self, config: ModelConfig, is_rotated: bool) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.is_rotated = is_rotated
        n_qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.wqkv: nn.Module = Linear(config.dim, n_qkv, bias=config.qkv_bias)
        self.wo: nn.Module = Linear(config.n_head * config.head_dim, config.dim, bias=config.wo_bias)
        self.qk_norm = QueryKeyNorm(config) if config.qk_norm else None

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        q = self.write(x, step, layer)
        kv = step.cache.read(layer, q)
        if self.is_rotated and step.slot_rotation is not None:
            keys, values = kv.dequantized(q.dtype)
            q = step.pointwise.rotate_heads(q.flatten(0, 1), step.rotation).view_as(q)
            kv = KV(rotate(keys, step.slot_rotation), values)
        y = step.backend.attend(q, kv, step.visible[layer])
        return self.wo(y.reshape(len(x), -1))

    def write(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """Write the entries of `x [B * T, dim]` to the cache; return the queries, `[B, T, n_head, head_dim]`."""
        heads = self.wqkv(x).view(len(x), -1, self.head_dim)
        q_and_k, v = heads.split([self.n_head + self.n_kv_head, self.n_kv_head], dim=1)
        norm = self.qk_norm.norm() if self.qk_norm is not None else None
        if self.is_rotated and step.slot_rotation is None:
            q_and_k = step.pointwise.rotate_heads(q_and_k, step.rotation, norm)
        elif norm is not None:
            q_and_k = norm_heads(q_and_k, norm)
        q, k = q_and_k.split([self.n_head, self.n_kv_head], dim=1)
        q, entries = (part.unflatten(0, step.block_shape) for part in (q, step.pointwise.pack(k, v)))
        step.cache.write(layer, step.slots, entries, step.pointwise.store)
        return q


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13: nn.Module = Linear(config.dim, 2 * config.ffn_dim, bias=config.mlp_bias)
        self.w2: nn.Module = Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.w2(step.pointwise.swiglu(self.w13(x)))


class ExpertFeedForward(nn.Module):
    """A feed-forward layer of which each token runs through a few experts, chosen by a router."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_expert, self.n_chosen = config.n_expert, config.n_expert_per_token
        self.is_normalised = config.normalise_experts
        self.router: nn.Module = Linear(config.dim, config.n_expert, bias=False)
        self.w13: nn.Module = StackedExperts(config.n_expert, config.dim, 2 * config.ffn_dim)
        self.w2: nn.Module = StackedExperts(config.n_expert, config.ffn_dim, config.dim)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        shares, chosen = route(self.router(x), self.n_chosen, self.is_normalised)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.n_expert, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        of_experts = step.pointwise.swiglu(self.w13(x[order // self.n_chosen], counts))
        y = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        y[order] = self.w2(of_experts, counts)
        return (y.unflatten(0, shares.shape) * shares[..., None]).sum(dim=1)


class Block(nn.Module):
    """Attention and feed-forward. `x` is the residual stream `[B * T, dim]`; `update` is still to be added to it."""

    def __init__(self, config: ModelConfig, is_rotated: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, is_rotated)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward: nn.Module = ExpertFeedForward(config) if config.n_expert else FeedForward(config)
        self.norm_eps = config.norm_eps

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        add_norm = step.pointwise.add_norm
        x, normed = add_norm(x, update, self.attention_norm.weight, self.norm_eps)
        x, normed = add_norm(x, self.attention(normed, step, layer), self.ffn_norm.weight, self.norm_eps)
        return x, self.feed_forward(normed, step)


# The function that runs blocks `first` to `end - 1` of a list: see `run_in_turn`.
RunBlocks: TypeAlias = Callable[[nn.ModuleList, Tensor, Tensor, Step, int, int], tuple[Tensor, Tensor]]


def run_in_turn(
    layers: nn.ModuleList, x: Tensor, update: Tensor, step: Step, first: int, end: int
) -> tuple[Tensor, Tensor]:
    """Run blocks `first` to `end - 1` over the residual stream `x` and the `update` to add to it first, `[B * T, dim]`.
    Returns the stream, and the last block's update."""
    for index in range(first, end):
        x, update = layers[index](x, update, step, index)
    return x, update


class Transformer(nn.Module):
    """`model(tokens [B, T] int64, positions [B, T] int64, cache) -> logits [B, T, vocab_size]`.

    Tokens are written to the cache at their positions, and see the entries that the cache's rule makes visible.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: AttentionBackend = TorchAttention()
        self.pointwise = EAGER
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, i not in config.unrotated_layers) for i in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        # None: the head is the embedding's weight.
        self.output: nn.Module | None = None
        if not config.tie_embeddings:
            self.output = Head(config.dim, config.vocab_size, bias=False)
        self.run_blocks: RunBlocks = run_in_turn
        # Not a buffer: frequencies stay in float32 when the weights are cast.
        self._rope = rope_of(config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and by default of caches."""
        return next(self.parameters()).dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def hidden(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """Compute the normalised last hidden states `[B, T, dim]`. A prefill needs `logits` of a part of them only."""
        return self.hidden_states(tokens, positions, cache)[0]

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, cache: Slots, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Compute `hidden`, and the inputs of `layers`, side by side in ascending order, `[B, T, k * dim]`. The input
        of layer `n_layer` is the last layer's output, not normalised. Without `layers`, `hidden` twice."""
        x = self.tok_embeddings(tokens).flatten(0, 1)
        x, update, inputs = self.run(x, torch.zeros_like(x), self.begin(positions, cache, x.dtype), layers)
        _, normed = self.pointwise.add_norm(x, update, self.norm.weight, self.config.norm_eps)
        last = normed.view(*tokens.shape, -1)
        return last, torch.cat(inputs, dim=-1).view(*tokens.shape, -1) if inputs else last

    def begin(self, positions: Tensor, cache: Slots, dtype: torch.dtype, see: See | None = None) -> Step:
        """Claim slots for a forward over `positions [B, T]` in `dtype`; return what its layers share.

        see: prepares what each layer sees, once the slots are claimed; by default, what the model's config says.
        """
        self._rope = Rope(*(part.to(positions.device) for part in self._rope))
        slots = cache.begin(positions)
        block_positions, slot_positions = cache.rotary_positions(positions)
        return Step(
            cache=cache,
            slots=slots,
            backend=self.backend,
            visible=(see or self._see)(positions, cache, dtype),
            rotation=rotation(block_positions.flatten(), self._rope, dtype),
            slot_rotation=None if slot_positions is None else rotation(slot_positions, self._rope, dtype),
            pointwise=self.pointwise,
            block_shape=positions.shape,
        )

    def _see(self, positions: Tensor, cache: Slots, dtype: torch.dtype) -> Sequence[Any]:
        spec = attention_spec(self.config, dtype)
        return [self.backend.prepare(spec, positions, cache)] * len(self.layers)

    def run(
        self, x: Tensor, update: Tensor, step: Step, inputs_of: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run all blocks over the residual stream `x` and the `update` to add to it first, both `[B * T, dim]`. Returns
        the stream, the last block's update, which is not added yet, and the inputs of layers `inputs_of`."""
        inputs, first = list[Tensor](), 0
        for end in sorted({*inputs_of, len(self.layers)}):
            x, update = self.run_blocks(self.layers, x, update, step, first, end)
            if end in inputs_of:
                inputs.append(x + update)
            first = end
        return x, update, inputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits `[..., vocab_size]` of hidden states `[..., dim]`, in `logits_dtype`."""
        if self.output is None:
            return to_logits(hidden, self.tok_embeddings.weight)
        return self.output(hidden)


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a model's logits: 16 bits would tie, but only GPUs multiply 16-bit numbers into float32."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize == 2 else dtype


def to_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x [..., dim]` by `weight [V, dim]` transposed, in `logits_dtype`."""
    dtype = logits_dtype(x.dtype, x.device)
    if dtype == x.dtype:
        return F.linear(x, weight)
    return torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=dtype).view(*x.shape[:-1], -1)


def attention_spec(config: ModelConfig, dtype: torch.dtype) -> AttentionSpec:
    """Return the shape of a model's attention."""
    return AttentionSpec(config.n_head, config.n_kv_head, config.head_dim, config.sliding_window, dtype)


def select_layers(model: Transformer, layers: Sequence[int]) -> Transformer:
    """Return a shallower Transformer with some of a model's layers, in the given order; weights are shared."""
    shallower = copy.copy(model)
    shallower._modules = dict(model._modules)  # a plain copy shares this dictionary
    shallower.layers, shallower.run_blocks = nn.ModuleList(model.layers[layer] for layer in layers), run_in_turn
    shallower.config = model.config.with_layers(layers)
    return shallower
