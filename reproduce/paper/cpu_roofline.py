"""The roofline where it can be compared: this CPU's rates, measured in seconds, and the default model's costs."""

import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from bench.auto.costs import tokens_per_round
from bench.config import Target
from bench.record import record_of
from cost_model.flags import CostFlags, SelfDraft
from cost_model.grid import CostGrid
from cost_model.machines import Machine
from cost_model.report import VARIED, measure_grid, open_largest
from cost_model.roofline import ModelStorage, predict_costs
from models.packed_linear import PackedLinear
from reproduce.paper.published import Record

ALPHA = 0.8
SIZES = CostFlags(
    Target(dtype="float32"),
    draft=SelfDraft(draft_weights="same"),
    contexts=(1000, 4000),
    batches=(1, 8),
    policies=("streaming",),
    budgets=(128, 512),
    gammas=(1, 3, 5),
    alpha=ALPHA,
)
RATES = ("bandwidth", "ops", "ops_32", "launch")
ROWS = 32  # of 8 sequences and 4 tokens


def cpu_rates() -> Machine:
    """Of layers as large as the default model's, packed as its are: bytes per second that products with one row read of
    more of them than fit into a cache; operations per second of products with ROWS rows and one that fits, in both
    dtypes; seconds of a product of almost nothing. No matrix unit pads rows of queries here."""
    many = [PackedLinear(torch.rand(1536, 576), None) for _ in range(64)]
    row, n_bytes = torch.rand(1, 576), 64 * 1536 * 576 * 4
    bandwidth = n_bytes / _seconds(lambda: [layer(row) for layer in many], 15)
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        rows, one = torch.rand(ROWS, 576).to(dtype), PackedLinear(torch.rand(1536, 576).to(dtype), None)
        rates.append(2 * ROWS * 1536 * 576 / _seconds(partial(one, rows), 200))
    tiny = PackedLinear(torch.rand(8, 8), None)
    return Machine(bandwidth, *rates, launch=_seconds(partial(tiny, torch.rand(1, 8)), 2000), tile=1)


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    return median(timeit.repeat(run, number=1, repeat=repeats))


def measure() -> Record:
    """A record: of every cost its prediction and its measurement. The rates are those right before and after a cell, on
    a line between which they are taken to lie. Errors: UserError."""
    session, rates = open_largest(SIZES), [cpu_rates()]
    rows, speedups = [], []
    target, draft = (ModelStorage(session.plan.target.config, dtype) for dtype in ("float32", "bfloat16"))
    for size in product(SIZES.batches, SIZES.contexts):
        found = measure_grid(session, replace(SIZES, batches=size[:1], contexts=size[1:]))
        rates.append(cpu_rates())
        between = {name: (getattr(rates[-2], name) + getattr(rates[-1], name)) / 2 for name in RATES}
        costs = partial(predict_costs, target, draft, replace(rates[-1], **between), *size, gammas=found.gammas)
        grids = CostGrid.of(found.drafts, {size: [costs(budget=budget) for _, budget in found.drafts]}), found
        own = dict(zip(("B", "prefix_len"), size, strict=True))
        names = ["plain step", *(f"verification, gamma {gamma}" for gamma in found.gammas)]
        names += [f"draft step, budget {budget}" for _, budget in found.drafts]
        each = ([float(ms) for part in (one.plain, one.verify, one.draft) for ms in part.flat] for one in grids)
        rows += [
            own | {"cost": name, "predicted_ms": a, "measured_ms": b} for name, a, b in zip(names, *each, strict=True)
        ]
        for one, gamma in product(found.drafts, found.gammas):
            gains = [grid.at(*size, one).speedup(tokens_per_round(ALPHA, gamma), gamma) for grid in grids]
            gained = dict(zip(("predicted", "from_measured_costs"), gains, strict=True))
            speedups.append(own | {"draft_budget": one[1], "gamma": gamma} | gained)
    measured = {f"{name}_each": [getattr(one, name) for one in rates] for name in RATES}
    return record_of("cpu_roofline", session, measured | {"rows": rows, "speedups": speedups}, without=VARIED)


def summary(records: Sequence[Record]) -> str:

    def off(part: str, predicted: str, measured: str) -> str:
        each = (median(abs(row[predicted] / row[measured] - 1) for row in record[part]) for record in records)
        return _listed([f"{error:.0%}" for error in each])

    last, threads = records[-1], _listed([str(record["threads"]) for record in records])
    return (
        f"on a CPU ({last['machine']}, threads: {threads}) predicted costs are off by "
        f"{off('rows', 'predicted_ms', 'measured_ms')} in the median of {len(last['rows'])}, and speedups that follow "
        f"from them by {off('speedups', 'predicted', 'from_measured_costs')}, run by run"
    )


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
