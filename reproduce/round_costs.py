"""What a round of Llama-3.1-8B launches and moves, by policy: its operations, on tensors without storage.

    python reproduce/round_costs.py --output reproduce/results/round_costs.jsonl

Needs Triton, and no GPU. An operation counts as one node, also where PyTorch launches several kernels for it, and so
does a function of `models.pointwise`, as where it is compiled. Of what a kernel may leave out all is counted.
"""

from collections import Counter
from dataclasses import astuple, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import cli
from common.jsonl import publish, require_appendable
from common.launch import Launch
from common.provenance import provenance
from common.tables import Column, console
from engine import ModelRunner, SelfSpeculation
from engine.batch import Batch
from engine.bench.config import Output
from engine.modes import GREEDY
from engine.round import Round
from engine.sampling import Filters, SamplingParams
from kv_cache import Full, Policy, packing, policies
from models import ModelConfig, Transformer
from models.attention.triton_backend import TritonAttention
from models.pointwise import EAGER, Pointwise, use_pointwise
from models.presets import preset_config

ATTENTION = ("split_kv", "combine", "note")
# What picks entries out of its first tensor, or writes some of them; and what launches nothing.
PICKING = ("index", "index_select", "gather", "embedding", "index_put_", "_index_put_impl_", "scatter_")
NOTHING = ("_unsafe_view", "empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
COLUMNS = [
    *(Column(name, name, align="<") for name in ("policy", "mode")),
    Column("refresh_per_layer", "nodes to choose, a layer", ".0f"),
    Column("round_per_layer", "nodes, a layer", ".0f"),
    Column("nodes", "nodes", ".0f"),
    *(Column(f"{kind}_gb", f"{kind}, GB", ".2f") for kind in ("weights", "attention", "layers", "outside")),
]


@dataclass(frozen=True)
class Flags(Output):
    B: int = 64
    """rows of a round"""
    prefix_len: int = 8000
    """tokens of a row"""
    gamma: int = 3
    """tokens that are drafted"""


class Costs(TorchDispatchMode):
    """Counts the nodes that are called within, and the bytes of each kind that they move."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.counts, self._is_within = Counter[str](), False
        self._weights = {x.untyped_storage()._cdata for x in model.parameters()}

    def add(self, given: Any, kind: str = "other") -> None:
        if self._is_within:
            return
        self.counts["nodes"] += 1
        for x in {id(x): x for x in tree_leaves(given) if isinstance(x, Tensor)}.values():
            size = torch.Size(n for n, step in zip(x.shape, x.stride(), strict=True) if step).numel()
            self.counts["weights" if x.untyped_storage()._cdata in self._weights else kind] += size * x.itemsize

    def launch(self, launch: Launch) -> None:
        tensors, name = dict(launch.arguments), launch.kernel.fn.__name__
        if name == "choose":
            tensors["target"] = tensors["target"][..., : tensors["n_chosen"], :]
            tensors["source"] = tensors["target"].detach()
        elif name == "pack_group":
            tensors["entries"] = tensors["entries"][..., : tensors["GROUP"], :]
            tensors = {key: x for key, x in tensors.items() if "codes" not in key and "grids" not in key}
        self.add(tensors, "attention" if name in ATTENTION else "other")

    def as_one(self, part: Any) -> Any:
        """A function that counts as one node."""

        def run(*given: Any) -> Any:
            self._is_within = True
            out = part(*given)
            self._is_within = False
            self.add((given, out))
            return out

        return run

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, schema = function(*args, **(kwargs or {})), function._schema
        name, returned = schema.name.removeprefix("aten::"), [x.alias_info for x in schema.returns]
        if name in PICKING:
            moved = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor) and x is not args[0]]
            self.add([*moved, *(x.detach() for x in moved if x.is_floating_point())])  # read and written
        elif name not in NOTHING and not any(alias and not alias.is_write for alias in returned):
            self.add((args, kwargs, out))
        return out


def costs_of(config: ModelConfig, policy: Policy | None, mode: str, flags: Flags) -> dict[str, Counter[str]]:
    """What each part of a captured round over all rows costs, in which the model drafts for itself over `policy`."""
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    model.backend, of_cache = TritonAttention(), (config, flags.B, flags.prefix_len + 200, "meta", torch.bfloat16)
    runner, drafter = ModelRunner(model, Full().new_cache(*of_cache)), None
    with patch("kv_cache.quantized.kernel_for", lambda *_: packing):
        if policy is not None:
            drafter = SelfSpeculation(runner, policy.new_cache(*of_cache), flags.gamma)
    batch = Batch(flags.B, Filters.of([SamplingParams(0.0 if mode == GREEDY else 0.6)]), "meta", narrows=False)
    round_, parts = Round(runner, batch, drafter, flags.gamma if drafter else 0, mode), dict[str, Counter[str]]()
    of_draft = ["refresh"] * bool(drafter and drafter.refresh_every) + ["draft"] * bool(drafter)
    for name in (*of_draft, "verify", "accept", "roll_back"):
        costs = Costs(model)
        use_pointwise(model, Pointwise("one node each", *map(costs.as_one, astuple(EAGER)[1:])))
        with (
            patch.object(Launch, "__call__", lambda launch, costs=costs: costs.launch(launch)),
            torch.inference_mode(),
            costs,
        ):
            getattr(round_, name)()
        parts[name] = costs.counts
    return parts


def row_of(policy: Policy | None, mode: str, flags: Flags) -> dict[str, Any]:
    """A round's nodes, and the gigabytes that it moves: of weights, for attention, and else in its layers and outside
    of them, where that is logits and random numbers most of all."""
    config = preset_config("meta-llama/Meta-Llama-3.1-8B")
    one, two = (costs_of(replace(config, n_layer=n), policy, mode, flags) for n in (1, 2))
    row: dict[str, Any] = {"policy": policy.name if policy else "none", "mode": mode}
    row |= {f"{name}_per_layer": (two[name] - one[name])["nodes"] for name in one}
    first = sum(one.values(), Counter[str]())
    layer = sum(two.values(), Counter[str]()) - first
    others = config.n_layer - 1
    row |= {"round_per_layer": layer["nodes"], "nodes": first["nodes"] + others * layer["nodes"]}
    row |= {f"{kind}_gb": 1e-9 * (first[kind] + others * layer[kind]) for kind in ("weights", "attention")}
    return row | {"layers_gb": 1e-9 * config.n_layer * layer["other"], "outside_gb": 1e-9 * (first - layer)["other"]}


def main(flags: Flags) -> None:
    require_appendable(flags.output)
    chosen = [None, *(policy() for policy in policies().values())]
    rows = [row_of(policy, mode, flags) for mode in (GREEDY, "coupled") for policy in chosen]
    sizes = {"B": flags.B, "prefix_len": flags.prefix_len, "gamma": flags.gamma}
    record = {"benchmark": "round_costs"} | sizes | {"rounds": rows} | provenance()
    publish(flags.output, record, console(rows, COLUMNS, indent=""))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
