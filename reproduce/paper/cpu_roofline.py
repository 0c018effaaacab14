"""The roofline where it can be compared: this CPU's rates, measured in seconds, and the default model's costs."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from engine.bench.cost_flags import CostFlags
from engine.bench.cost_report import VARIED, measure_grid, open_largest
from engine.bench.record import record_of
from engine.cost_model.costs import Costs, tokens_per_round
from engine.cost_model.machines import Machine
from engine.cost_model.roofline import Kernels, Stored, predict_costs
from models.packed_linear import PackedLinear
from reproduce.paper.published import Record

ALPHA = 0.8
SIZES = CostFlags(
    contexts=(1000, 4000), batches=(1, 8), policies=("streaming",), budgets=(128, 512), gammas=(1, 3, 5), alpha=ALPHA
)
# No matrix unit pads rows of queries here.
CPU = Kernels(tile=1)
ROWS = 32  # of 8 sequences and 4 tokens


def cpu_rates() -> Machine:
    """Of layers as large as the default model's, packed as its are: bytes per second that products with one row read of
    more of them than fit into a cache; operations per second of products with ROWS rows and one that fits, in both
    dtypes; seconds of a product of almost nothing."""
    many = [PackedLinear(torch.rand(1536, 576), None) for _ in range(64)]
    row, n_bytes = torch.rand(1, 576), 64 * 1536 * 576 * 4
    bandwidth = n_bytes / _seconds(lambda: [layer(row) for layer in many], 15)
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        rows, one = torch.rand(ROWS, 576).to(dtype), PackedLinear(torch.rand(1536, 576).to(dtype), None)
        rates.append(2 * ROWS * 1536 * 576 / _seconds(partial(one, rows), 200))
    tiny = PackedLinear(torch.rand(8, 8), None)
    return Machine("this CPU", bandwidth, *rates, launch=_seconds(partial(tiny, torch.rand(1, 8)), 2000))


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return median(found)


def measure() -> Record:
    """A record: of every cost its prediction and its measurement. The rates are those right before and after a cell, on
    a line between which they are taken to lie. Errors: UserError."""
    session, rates = open_largest(SIZES), [cpu_rates()]
    rows, speedups, shape = [], [], session.plan.target.config
    for batch, context in product(SIZES.batches, SIZES.contexts):
        grid = measure_grid(session, replace(SIZES, batches=(batch,), contexts=(context,)))
        rates.append(cpu_rates())
        machine, own, costs = _between(*rates[-2:]), {"B": batch, "prefix_len": context}, {}
        for draft in grid.drafts:
            sizes = {"batch": batch, "context": context, "budget": draft[1], "gammas": grid.gammas}
            said = predict_costs(Stored(shape, "float32"), Stored(shape, "bfloat16"), machine, **sizes, how=CPU)
            found = grid.at(batch, context, draft)
            costs |= dict(zip(_named(draft[1], said), zip(_values(said), _values(found), strict=True), strict=True))
            for gamma in grid.gammas:
                pair = [one.speedup(tokens_per_round(ALPHA, gamma), gamma) for one in (said, found)]
                named = own | {"draft_budget": draft[1], "gamma": gamma}
                speedups.append(named | dict(zip(("predicted", "from_measured_costs"), pair, strict=True)))
        pairs = {name: {"predicted_ms": ms[0], "measured_ms": ms[1]} for name, ms in costs.items()}
        rows += [own | {"cost": name} | pair for name, pair in pairs.items()]
    named = ("bandwidth", "ops", "ops_32", "launch")
    measured = {f"{name}_each": [getattr(one, name) for one in rates] for name in named}
    return record_of("cpu_roofline", session, measured | {"rows": rows, "speedups": speedups}, without=VARIED)


def _between(before: Machine, after: Machine) -> Machine:
    middle = {
        name: (getattr(before, name) + getattr(after, name)) / 2 for name in ("bandwidth", "ops", "ops_32", "launch")
    }
    return replace(before, **middle)


def _named(budget: int, costs: Costs) -> list[str]:
    """What the costs of a cell are called; only a draft step is its budget's own."""
    return ["plain step", *(f"verification, gamma {gamma}" for gamma in costs.at), f"draft step, budget {budget}"]


def _values(costs: Costs) -> list[float]:
    return [costs.plain_ms, *costs.verify_ms, costs.draft_ms]


def error(row: Record) -> float:
    """Predicted over measured, less 1; of a speedup, over what measured costs give."""
    if "predicted_ms" in row:
        return row["predicted_ms"] / row["measured_ms"] - 1
    return row["predicted"] / row["from_measured_costs"] - 1
