"""The Transformer of every Llama-family model. The cache is an argument; drafts and policies are unknown here."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache.entries import KV
from models.attention import AttentionBackend, AttentionSpec, Slots, TorchAttention
from models.config import ModelConfig
from models.pointwise import EAGER, Pointwise
from models.rope import Rotation, inverse_frequencies, rotate, rotation


@dataclass(frozen=True)
class Step:
    """What all layers of one forward share."""

    cache: Slots
    slots: Any
    backend: AttentionBackend
    visible: Any
    rotation: Rotation  # of the block's tokens `[B * T]`
    slot_rotation: Rotation | None  # of the slots `[B, C]`, where the cache stores keys un-rotated
    pointwise: Pointwise
    block_shape: torch.Size


class Linear(nn.Linear):
    """Not initialised while it waits for a checkpoint: doing so on the meta device imports 80 MB of Python."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Head(Linear):
    """The layer behind the last hidden state. Logits of 16 bits would tie: float32 where a device's product can."""

    def forward(self, x: Tensor) -> Tensor:
        return to_logits(x, self.weight)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        n_qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.wqkv: nn.Module = Linear(config.dim, n_qkv, bias=config.qkv_bias)
        self.wo: nn.Module = Linear(config.n_head * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        heads = self.wqkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        if step.slot_rotation is None:
            q_and_k = step.pointwise.rotate_heads(heads[:, : self.n_head + self.n_kv_head], step.rotation)
            q, k = q_and_k.split([self.n_head, self.n_kv_head], dim=1)
        q, new = (part.unflatten(0, step.block_shape) for part in (q, step.pointwise.pack(k, v)))
        step.cache.write(layer, step.slots, new, step.pointwise.store)
        kv = step.cache.read(layer, q)
        if step.slot_rotation is not None:
            keys, values = kv.dequantized(q.dtype)
            turned = step.pointwise.rotate_heads(q.flatten(0, 1), step.rotation).view_as(q)
            q, kv = turned, KV(rotate(keys, step.slot_rotation), values)
        y = step.backend.attend(q, kv, step.visible)
        return self.wo(y.reshape(len(x), -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13: nn.Module = Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w2: nn.Module = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.w2(step.pointwise.swiglu(self.w13(x)))


class Block(nn.Module):
    """`x` is the residual stream `[B * T, dim]`, `update` what the block before adds to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.norm_eps = config.norm_eps

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        add_norm = step.pointwise.add_norm
        x, normed = add_norm(x, update, self.attention_norm.weight, self.norm_eps)
        x, normed = add_norm(x, self.attention(normed, step, layer), self.ffn_norm.weight, self.norm_eps)
        return x, self.feed_forward(normed, step)


class Transformer(nn.Module):
    """`model(tokens [B, T] int64, positions [B, T] int64, cache) -> logits [B, T, vocab_size]`. Tokens are written to
    the cache at their positions and see what the cache's rule shows them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: AttentionBackend = TorchAttention()
        self.pointwise = EAGER
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        # None: the head is the embedding's weight.
        self.output: nn.Module | None = None
        if not config.tie_embeddings:
            self.output = Head(config.dim, config.vocab_size, bias=False)
        # Not a buffer: frequencies stay float32 whatever dtype the weights are cast to.
        self._frequencies = inverse_frequencies(config)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights, and so of the caches that go with them."""
        return next(self.parameters()).dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        return self.logits(self.hidden(tokens, positions, cache))

    def hidden(self, tokens: Tensor, positions: Tensor, cache: Slots) -> Tensor:
        """Normalised last hidden states `[B, T, dim]`; `logits` of a part of them is all a prefill needs."""
        return self.hidden_states(tokens, positions, cache)[0]

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, cache: Slots, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """`hidden`, and the inputs of those layers side by side, ascending, `[B, T, k * dim]`: that of layer `n_layer`
        is the last one's output, not normalised. Without `layers`, `hidden` twice."""
        x = self.tok_embeddings(tokens).flatten(0, 1)
        x, update, inputs = self.run(x, torch.zeros_like(x), positions, cache, layers)
        _, normed = self.pointwise.add_norm(x, update, self.norm.weight, self.config.norm_eps)
        last = normed.view(*tokens.shape, -1)
        return last, torch.cat(inputs, dim=-1).view(*tokens.shape, -1) if inputs else last

    def run(
        self, x: Tensor, update: Tensor, positions: Tensor, cache: Slots, inputs_of: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """All blocks over a residual stream and what is added to it first, both `[B * T, dim]`: the stream behind them,
        what the last one adds to it, and the inputs of those layers."""
        self._frequencies = self._frequencies.to(x.device)
        slots = cache.begin(positions)
        places, slot_places = cache.rotary_positions(positions)
        step = Step(
            cache=cache,
            slots=slots,
            backend=self.backend,
            visible=self.backend.prepare(attention_spec(self.config, x.dtype), positions, cache),
            rotation=rotation(places.flatten(), self._frequencies, x.dtype),
            slot_rotation=None if slot_places is None else rotation(slot_places, self._frequencies, x.dtype),
            pointwise=self.pointwise,
            block_shape=positions.shape,
        )
        inputs = []
        for index, layer in enumerate(self.layers):
            if index in inputs_of:
                inputs.append(x + update)
            x, update = layer(x, update, step, index)
        if len(self.layers) in inputs_of:
            inputs.append(x + update)
        return x, update, inputs

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., dim] -> [..., vocab_size]`, in `logits_dtype`."""
        if self.output is None:
            return to_logits(hidden, self.tok_embeddings.weight)
        return self.output(hidden)


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """That of the logits of a model of `dtype`: CPUs have no product of 16-bit numbers in float32."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize == 2 else dtype


def to_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x [..., dim]` times `weight [V, dim]` transposed, in `logits_dtype`."""
    dtype = logits_dtype(x.dtype, x.device)
    if dtype == x.dtype:
        return F.linear(x, weight)
    return torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=dtype).view(*x.shape[:-1], -1)


def attention_spec(config: ModelConfig, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(config.n_head, config.n_kv_head, config.head_dim, config.sliding_window, dtype)


def select_layers(model: Transformer, layers: Sequence[int]) -> Transformer:
    """A shallower Transformer of some of a model's layers, in the order given; weights are shared."""
    shallower = copy.copy(model)
    shallower._modules = dict(model._modules)  # which a plain copy shares
    shallower.layers = nn.ModuleList(model.layers[layer] for layer in layers)
    shallower.config = replace(model.config, n_layer=len(layers))
    return shallower
