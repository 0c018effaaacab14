"""Predicts the costs of steps on another machine by a roofline, from the bytes and operations that they take.

Every part of a forward takes the longer of its bytes over the memory's bandwidth and its operations over their rate
(Williams, Waterman and Patterson 2009, Communications of the ACM 52(4), 65-76). To their sum come the collectives of
tensor parallelism and the launches of kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.auto.costs import Costs
from common.errors import refuse
from cost_model.machines import Machine
from models.config import ModelConfig

# Bytes of a number by its format; int4 has a scale and a zero point in bfloat16 for 32 weights.
ITEMSIZE = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 32}


class ModelStorage(NamedTuple):
    """The shape of a model, and the formats of its weights and KV entries (None: dtype)."""

    config: ModelConfig
    dtype: str = "bfloat16"
    weights: str | None = None
    kv: str | None = None

    def n_weights_of(self, n_expert: float) -> float:
        """Return the weights of matrix products, with the head's and `n_expert` of each layer's experts."""
        config, left_out = self.config, self.config.n_expert - n_expert
        layer = config.n_linear_weights_per_layer - left_out * config.n_weights_of_expert
        return config.n_layer * layer + config.vocab_size * config.dim

    def resident_bytes(self, machine: Machine, n_entries: int) -> float:
        """Return the bytes of weights and of `n_entries` KV entries on each device, without activations."""
        config, n = self.config, machine.devices
        heads = math.ceil(config.n_kv_head / n) / config.n_kv_head
        kv = config.kv_bytes_per_token(1) * ITEMSIZE[self.kv or self.dtype] * heads
        return config.n_parameters * ITEMSIZE[self.weights or self.dtype] / n + n_entries * kv


def forward_ms(model: ModelStorage, machine: Machine, batch: int, tokens: int, entries: int) -> float:
    """Return the ms of a forward of `tokens` in each of `batch` rows after `entries` KV entries, on the device with the
    largest share. Errors: ConfigError for too many devices."""
    config, n = model.config, machine.devices
    if n > config.n_kv_head:
        what, fix = "the model has fewer KV heads than the machine devices", "name fewer devices"
        refuse("machine", n, f"<= {config.n_kv_head}, its KV heads", what, fix)
    ops = machine.ops_32 if model.dtype == "float32" else machine.ops
    # Products with weights.
    weight_bytes = model.n_weights_of(config.experts_touched(batch * tokens)) * ITEMSIZE[model.weights or model.dtype]
    weight_ops = 2 * model.n_weights_of(config.n_expert_per_token) * batch * tokens
    share = {"int8": machine.linear_8_bits, "int4": machine.linear_4_bits}.get(model.weights or "", machine.linear)
    linear = max(weight_bytes / n / (share * machine.bandwidth), weight_ops / n / ops)
    # Attention.
    heads = math.ceil(config.n_kv_head / n)
    in_tile = config.group_size if machine.packs_group or tokens == 1 else 1  # of the heads that share KV
    rows = config.group_size // in_tile * math.ceil(tokens * in_tile / machine.tile) * machine.tile
    kv_bytes = config.kv_bytes_per_token(1) * ITEMSIZE[model.kv or model.dtype] * entries
    products = 4 * config.n_layer * heads * config.head_dim * rows * entries * batch
    kv_bytes *= batch * heads / config.n_kv_head
    attention = max(kv_bytes / (machine.attention * machine.bandwidth), products / ops)
    hidden = machine.collective_s(batch * tokens * config.dim * ITEMSIZE[model.dtype])
    logits = machine.collective_s(batch * tokens * config.vocab_size * 4, is_reduced=False)
    collectives = (2 * config.n_layer + 1) * hidden + logits  # two halves of a layer, and the embedding
    launches = machine.kernels * config.n_layer * machine.launch
    return 1e3 * (linear + attention + collectives + launches + machine.unexplained)


def predict_costs(
    target: ModelStorage,
    draft: ModelStorage,
    machine: Machine,
    batch: int,
    context: int,
    budget: int,
    gammas: Sequence[int],
) -> Costs:
    """Return the costs of a target after `context` tokens, and of a draft whose cache has at most `budget` entries.

    A draft with fewer KV heads than devices runs on a device per head. The rest of a round, which is the host's work,
    is not predicted: 0. Errors: ConfigError.
    """
    plain, *verify = (forward_ms(target, machine, batch, n + 1, context) for n in (0, *gammas))
    drafts_on = replace(machine, devices=min(machine.devices, draft.config.n_kv_head))
    drafted = forward_ms(draft, drafts_on, batch, 1, min(budget, context))
    return Costs(plain, tuple(gammas), tuple(verify), drafted, 0.0)
