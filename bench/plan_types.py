"""Plan and DraftPlan: a run that was checked, with every `auto` resolved and nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.config import RunConfig
from engine.drafters.config import DrafterConfig, ModelDrafterConfig
from engine.drafters.self_speculation import SelfConfig
from engine.sampling.distribution import SamplingParams
from kv_cache import Policy
from models import ModelConfig
from models.attention import Selection, select_backend
from models.checkpoints.model_source import ModelSource
from models.llama import attention_spec

# A prompt: a text, or its token ids.
PromptText = str | Sequence[int]


@dataclass(frozen=True)
class DraftPlan:
    """A draft with its sizes and its storage.

    gamma: draft tokens per round; with `auto_gamma`, the most. policies: policies of its KV cache to choose among in
    every round, largest budget first; empty without a cache. length: tokens of the longest row. dtype, quantize,
    kv_dtype: storage of a draft with a cache. source: the second model, or None if the target drafts. inner: the draft
    that drafts for this draft. alternatives: drafts that rounds may take instead of this draft.
    """

    config: DrafterConfig
    gamma: int
    auto_gamma: bool = False
    policies: tuple[Policy, ...] = ()
    length: int = 0
    dtype: torch.dtype | None = None
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    source: ModelSource | None = None
    inner: DraftPlan | None = None
    alternatives: tuple[DraftPlan, ...] = ()

    @property
    def policy(self) -> Policy | None:
        """The policy with the largest budget."""
        return self.policies[0] if self.policies else None

    @property
    def capacities(self) -> tuple[int, ...]:
        """KV entries of a row under each policy."""
        return tuple(policy.entries(self.length) for policy in self.policies)

    @property
    def capacity(self) -> int:
        """KV entries of a row under the policy with the largest budget; 0 without a cache."""
        return max(self.capacities, default=0)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers of the target that a self-draft runs; None for all."""
        return self.config.layers if isinstance(self.config, SelfConfig) else None

    @property
    def levels(self) -> tuple[DraftPlan, ...]:
        """The draft, the drafts that draft for it, and its alternatives."""
        inner = self.inner.levels if self.inner else ()
        return (self, *inner, *self.alternatives)

    @property
    def weights(self) -> tuple[object, ...]:
        """A key that drafts with the same weights have in common."""
        return self.source, self.dtype, self.quantize, self.layers

    @property
    def gammas(self) -> tuple[int, ...]:
        """Every gamma above 0 that a round of any of the drafts may have, ascending."""
        return tuple(range(1, self.most_gamma + 1)) if self.auto_gamma else (self.gamma,)

    @property
    def most_gamma(self) -> int:
        """The most draft tokens of a round of any of the drafts."""
        return max([self.gamma, *(other.gamma for other in self.alternatives)])

    @property
    def auto_policy(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and bool(self.config.policies)

    @property
    def auto_budget(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and self.config.auto_budget

    @property
    def automatic(self) -> bool:
        """True if gamma, policy or budget is chosen before every round."""
        return self.auto_gamma or self.auto_policy or self.auto_budget

    def each(self) -> list[DraftPlan]:
        """Return a draft for each policy, in their order, or the draft if it has no cache; then its alternatives."""
        alone = replace(self, alternatives=())
        each = [replace(alone, policies=(policy,)) for policy in self.policies] or [alone]
        return each + [draft for other in self.alternatives for draft in other.each()]


@dataclass(frozen=True)
class Plan:
    """A checked run. Sizes are per replica, but `n_prompts` counts the prompts of all replicas.

    verification: the mode that verifies drafts. prompts: the user's prompts as token ids; empty in a server; None if
    they are cut from the dataset. prefix_len: tokens of the longest prompt. capacity: KV entries of a row of the
    target's cache. group, draft_group: ranks that hold the target and the draft model, in shard order.
    """

    config: RunConfig
    sampling: SamplingParams
    verification: str
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    target: ModelSource
    draft_source: ModelSource | None
    draft: DraftPlan | None
    dataset: str | None
    prompts: list[list[int]] | None
    n_rows: int
    n_prompts: int
    prefix_len: int
    capacity: int
    group: tuple[int, ...]
    draft_group: tuple[int, ...]

    @property
    def gen_len(self) -> int:
        return self.config.sizes.gen_len

    @property
    def gamma(self) -> int:
        """The most draft tokens of a round."""
        return self.draft.most_gamma if self.draft else 0

    @property
    def chooses(self) -> bool:
        """True if a decode has rounds, and something is chosen before each."""
        return self.draft is not None and self.draft.automatic and self.gamma > 0 and self.gen_len > 1

    @property
    def reproducible(self) -> bool:
        """True if speculation emits the tokens of plain decoding, not only tokens of their distribution."""
        return self.sampling.greedy or self.verification == "coupled"

    def shares_weights(self, draft: DraftPlan) -> bool:
        """Return whether a draft runs the target's weights as they are stored."""
        return (draft.source, draft.dtype, draft.quantize) == (None, self.dtype, self.config.target.quantize)

    def attention(self, config: ModelConfig, dtype: torch.dtype, entries: torch.dtype | None = None) -> Selection:
        """Return the attention backend for a model, or its shard, over KV entries of a dtype, and why it was chosen."""
        return select_backend(self.config.target.attention, self.device, attention_spec(config, dtype), entries)
