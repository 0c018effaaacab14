"""Parts of DSpark and DFlash 2 heads: what ties the drafts of a block to each other, next to its layers' attention."""

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.llama import Block, Embedding, Linear, Step


class MarkovHead(nn.Module):
    """A bias of the logits by the token before, `W2 W1[token]`, of low rank (DSpark).

    kind: `gated` by the state, or `rnn`, with a recurrent state over the block, or `vanilla`.
    """

    def __init__(self, n_id: int, n_draft_id: int, rank: int, dim: int, kind: str) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1, self.markov_w2 = Embedding(n_id, rank), Linear(rank, n_draft_id, bias=False)
        if kind == "gated":
            self.gate_proj = Linear(dim + rank, rank)
        if kind == "rnn":
            self.joint_proj = Linear(2 * rank + dim, 3 * rank)

    def forward(
        self, known: Tensor, state: Tensor, token: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits `[B, n_id]` of the draft after `token [B]`, and the memory for the next draft.

        known: logits by `state [B, dim]` alone. memory: of the draft before; None for the first of a block.
        """
        before = self.markov_w1(token)
        state = state.to(before.dtype)
        if self.kind == "gated":
            before = self.gate_proj(torch.cat([state, before], dim=-1)).sigmoid() * before
        if self.kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            gate, candidate, before = self.joint_proj(torch.cat([memory, before, state], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            memory, before = gate * memory + (1 - gate) * candidate.tanh(), before.tanh()
        return known + self.markov_w2(before).to(known.dtype), memory


class CandidateSelector(nn.Module):
    """Scores of the `top_k` likeliest ids by the token before and the state; other ids are not drafted (DFlash 2)."""

    def __init__(self, n_id: int, dim: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook, self.successor_codebook = (nn.Parameter(torch.zeros(n_id, rank)) for _ in range(2))
        self.hidden_projection = Linear(dim, rank, bias=False)

    def forward(
        self, known: Tensor, state: Tensor, token: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of the ids, like `MarkovHead`."""
        candidates = known.topk(self.top_k).indices
        context = self.predecessor_codebook[token] * self.hidden_projection(state.to(self.predecessor_codebook.dtype))
        scores = (context[:, None] * self.successor_codebook[candidates]).sum(dim=-1).to(known.dtype)
        logits = torch.full_like(known, float("-inf"))
        return logits.scatter(1, candidates, known.gather(1, candidates) + scores), memory


# What makes a draft depend on the token before it.
BlockChain: TypeAlias = MarkovHead | CandidateSelector


class BlockConvolution(nn.Module):
    """Causal convolutions within a block, before and after a part of a layer, whose kernels depend on the token.

    A tap's coefficient is `base_kernel`'s of the channel plus that of its group of channels, which the part's input
    projects to.
    """

    def __init__(self, dim: int, n_tap: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, n_tap, dim))
        self.kernel_projection = Linear(dim, 2 * n_tap * (dim // group), bias=False)
        self._n_tap, self._group = n_tap, group

    def before(self, x: Tensor, block_shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return the convolved input `[B * T, dim]` of the part, and the kernels of its output."""
        kernels = self.kernel_projection(x).view(len(x), 2, self._n_tap, -1).repeat_interleave(self._group, dim=-1)
        into, out = (kernels + self.base_kernel).unbind(1)
        return self.after(x, into, block_shape), out

    def after(self, x: Tensor, kernels: Tensor, block_shape: torch.Size) -> Tensor:
        """Return the convolved output `[B * T, dim]` of the part. kernels: `[B * T, taps, dim]`."""
        blocks, n_token = x.unflatten(0, block_shape), block_shape[1]
        taps = [F.pad(blocks, (0, 0, tap, 0))[:, :n_token].flatten(0, 1) for tap in range(self._n_tap)]
        return (torch.stack(taps, dim=1) * kernels).sum(dim=1)


class ConvolvedBlock(Block):
    """A layer of a DFlash 2 head, with convolutions around attention and feed-forward."""

    def __init__(self, config: ModelConfig, n_tap: int, group: int) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = (BlockConvolution(config.dim, n_tap, group) for _ in range(2))

    def forward(self, x: Tensor, update: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        add_norm, shape = step.pointwise.add_norm, step.block_shape
        x, normed = add_norm(x, update, self.attention_norm.weight, self.norm_eps)
        given, kernels = self.attention_conv.before(normed, shape)
        attended = self.attention_conv.after(self.attention(given, step, layer), kernels, shape)
        x, normed = add_norm(x, attended, self.ffn_norm.weight, self.norm_eps)
        given, kernels = self.mlp_conv.before(normed, shape)
        return x, self.mlp_conv.after(self.feed_forward(given, step), kernels, shape)
