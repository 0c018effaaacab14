"""What a round of Llama-3.1-8B launches and moves, by policy: its operations, on tensors without storage.

    python tests/support/round_costs.py --output reproduce/results/round_costs.jsonl

Needs Triton, and no GPU. An operation counts as one node, also where PyTorch launches several kernels for it, and so
does a function of `models.kernels.pointwise`, as where it is compiled. Of what a kernel may leave out all is counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.config import Output
from common import cli
from common.jsonl import publish, require_appendable
from common.launch import Launch
from common.provenance import provenance
from common.tables import Column, console
from engine import ModelRunner, SelfSpeculation
from engine.batch import Batch
from engine.modes import GREEDY
from engine.round import Round
from engine.sampling import triton_draws
from engine.sampling.distribution import Filters, SamplingParams
from kv_cache import Policy, triton_packing
from kv_cache.full import Full
from kv_cache.policy import policies
from models import Transformer
from models.attention.triton_backend import TritonAttention
from models.checkpoints.presets import preset_config
from models.kernels.pointwise import EAGER, Pointwise, use_pointwise

N_ROW, LENGTH, GAMMA = 64, 8200, 3
# What picks entries out of its first tensor, or writes some of them; and what launches nothing.
PICKING = ("index", "index_select", "gather", "embedding", "index_put_", "_index_put_impl_", "scatter_")
NOTHING = ("_unsafe_view", "empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")
COLUMNS = [
    *(Column(name, name, align="<") for name in ("policy", "mode")),
    *(Column(name, name.replace("_", " "), ".0f") for name in ("nodes_to_choose", "nodes_a_layer", "nodes")),
    *(Column(f"{kind}_gb", f"{kind}, GB", ".2f") for kind in ("weights", "attention", "layers", "outside")),
]


class Costs(TorchDispatchMode):
    """Counts the nodes that are called within, and the bytes of each kind that they move."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.counts, self._is_within = Counter[str](), False
        self._weights = {x.untyped_storage()._cdata for x in model.parameters()}

    def add(self, given: Any, kind: str = "other") -> None:
        self.counts["nodes"] += not self._is_within
        for x in {id(x): x for x in tree_leaves(given) if isinstance(x, Tensor) and not self._is_within}.values():
            size = torch.Size(n for n, step in zip(x.shape, x.stride(), strict=True) if step).numel()
            self.counts["weights" if x.untyped_storage()._cdata in self._weights else kind] += size * x.itemsize

    def launch(self, launch: Launch) -> None:
        given, name = launch.arguments, launch.kernel.fn.__name__
        if name == "choose":
            copied = given["target"][..., : given["n_chosen"], :]
            self.add([given["shares"], copied, copied.detach()])
        elif name == "pack_group":
            self.add(given["entries"][..., : given["GROUP"], :])
        elif name in ("draw_row", "filter_row"):
            self.add(given)
        else:
            self.add(given, "attention")

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


@contextmanager
def drawn_by_triton() -> Iterator[None]:
    """Random numbers and filters by the kernels of a GPU."""
    with (
        patch("engine.sampling.noise.triton_kernels", lambda: triton_draws),
        patch("engine.sampling.distribution.triton_kernels", lambda: triton_draws),
    ):
        yield


def costs_of(n_layer: int, policy: Policy | None, mode: str) -> dict[str, Counter[str]]:
    """What each part of a captured round of so many layers costs, in which the model drafts for itself."""
    config = replace(preset_config("meta-llama/Meta-Llama-3.1-8B"), n_layer=n_layer)
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    model.backend, of_cache = TritonAttention(), (config, N_ROW, LENGTH, "meta", torch.bfloat16)
    runner, drafter = ModelRunner(model, Full().new_cache(*of_cache)), None
    reads = patch("models.attention.selection.triton_reads", lambda _: True)
    right = patch("kv_cache.triton_choosing.is_right", lambda *_: True)
    with patch("kv_cache.quantized.kernel_for", lambda *_: triton_packing), reads, right:
        if policy is not None:
            drafter = SelfSpeculation(runner, policy.new_cache(*of_cache), GAMMA)
    sampling = SamplingParams() if mode == GREEDY else SamplingParams(0.6, top_p=0.9)
    batch = Batch(N_ROW, Filters.of([sampling]), "meta", narrows=False)
    parts = dict[str, Counter[str]]()

    def measured(name: str, part: Callable[[], Any], verifies: bool = False) -> Any:
        """Run a part of the round, and count what it costs, where a GPU would capture it."""
        costs = Costs(model)
        use_pointwise(model, Pointwise("one node each", *map(costs.as_one, astuple(EAGER)[1:-1])))
        launched = patch.object(Launch, "__call__", lambda launch: costs.launch(launch))
        with torch.inference_mode(), launched, drawn_by_triton(), costs:
            result = part()
        parts[name] = costs.counts
        return result

    round_ = Round(runner, batch, drafter, GAMMA if drafter else 0, mode)
    round_._part = measured
    if drafter is not None:
        drafter.n_rounds = 1  # the second round is the first with a refresh
        round_.propose()
    round_.verify()
    round_.accept()
    round_.roll_back()
    return parts


def row_of(policy: Policy | None, mode: str) -> dict[str, Any]:
    """A round's nodes, and the gigabytes that it moves: of weights, for attention, and else in its layers and outside
    of them, where that is logits and random numbers most of all."""
    others = preset_config("meta-llama/Meta-Llama-3.1-8B").n_layer - 1
    one, two = (costs_of(n, policy, mode) for n in (1, 2))
    choosing, first = (two.get("refresh", Counter()) - one.get("refresh", Counter())), sum(one.values(), Counter())
    layer = sum(two.values(), Counter()) - first
    row = {"policy": policy.name if policy else "none", "mode": mode, "nodes_to_choose": choosing["nodes"]}
    row |= {"nodes_a_layer": layer["nodes"], "nodes": first["nodes"] + others * layer["nodes"]}
    row |= {f"{kind}_gb": 1e-9 * (first[kind] + others * layer[kind]) for kind in ("weights", "attention")}
    return row | {"layers_gb": 1e-9 * (others + 1) * layer["other"], "outside_gb": 1e-9 * (first - layer)["other"]}


def main(flags: Output) -> None:
    require_appendable(flags.output)
    chosen = [None, *(policy() for policy in policies().values())]
    rows = [row_of(policy, mode) for mode in (GREEDY, "coupled", "rejection") for policy in chosen]
    record = {"benchmark": "round_costs", "B": N_ROW, "capacity": LENGTH, "gamma": GAMMA, "rounds": rows}
    publish(flags.output, record | provenance(), console(rows, COLUMNS))


if __name__ == "__main__":
    cli.run_alone(main, Output)
