"""The program of the cost model: costs of sizes and drafts, and the speedups that follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple

from tyro.conf import arg

from bench.auto.costs import MS_OF_ROUNDS, Costs, tokens_per_round
from bench.config import AUTO, Output, Target
from bench.draft_flags import BUDGETED
from bench.record import rounded
from common.errors import flag, refuse, require_at_least
from common.flags import Given
from common.jsonl import publish, read_lines, require_appendable
from common.provenance import git_commit
from common.say import note_without_effect, say
from common.tables import Column, console
from cost_model.machines import find_machine
from cost_model.published import published_acceptance
from cost_model.roofline import ITEMSIZE, ModelStorage, predict_costs
from models.config import ModelConfig
from models.names import Dtype, KVDtype, Scheme, parse_layers

# Fields of `Target` that a prediction depends on.
PREDICTED_BY = ("model", "model_name", "dtype", "quantize", "kv_dtype")
Budgeted: Any = Literal[tuple(BUDGETED)]
Draft = tuple[str, int | None]  # policy and budget


class Cell(NamedTuple):
    """The costs of a draft in a batch after a context (tokens), its acceptance rate, and whether memory holds them."""

    batch: int
    context: int
    draft: Draft
    costs: Costs
    alpha: float
    fits: bool = True

    def speedup(self, gamma: int) -> float:
        return self.costs.speedup(tokens_per_round(self.alpha, gamma), gamma)

    def speedup_text(self, gamma: int) -> str:
        """Return the predicted speedup, or that memory does not hold the batch."""
        return f"{self.speedup(gamma):.2f}" if self.fits else "does not fit"

    def prediction(self) -> dict[str, Any]:
        """Return the row of a record."""
        (policy, budget), costs = self.draft, self.costs
        size = {"B": self.batch, "prefix_len": self.context, "draft_policy": policy, "draft_budget": budget}
        ms = {"predicted_plain_ms": costs.plain_ms, "predicted_draft_ms": costs.draft_ms}
        return size | {"acceptance_rate": self.alpha} | ms | {"predicted_verify_ms": costs.verify_ms}


@dataclass(frozen=True)
class CostFlags:
    """Predict what speculation gains, by the costs of a machine that is not here, or by costs that runs measured."""

    target: Target = field(default_factory=Target)
    output: Output = field(default_factory=Output)
    machine: str | None = None
    """A100-40, A100-80, H100, H200, L40 or L40S, eight of them as 8xH100, or numbers in SI units, such as
    8xbandwidth=2e12,ops=3e14,link=3e11,latency=1e-5; H200-MEASURED: with the rates of kernels in machines.toml"""
    records: str | None = None
    """in place of --machine: a file with records of runs that chose by `auto`, which measured costs and acceptance"""
    batches: Annotated[tuple[int, ...], arg(aliases=["--B", "--batch_size"])] = (1, 4, 8)  # rows decoded together
    contexts: Annotated[tuple[int, ...], arg(aliases=["--context", "--prefix_len"])] = (1000, 4000)  # tokens per row
    policies: Annotated[tuple[Budgeted, ...], arg(aliases=["--draft_policy"])] = ("streaming", "snapkv")  # of drafts
    budgets: Annotated[tuple[int, ...], arg(aliases=["--draft_budget"])] = (64, 128, 256, 512)  # KV entries of a draft
    gammas: Annotated[tuple[int, ...], arg(aliases=["--gamma"])] = (1, 2, 3, 4, 6)  # tokens drafted per round
    alpha: Given[float] = None  # acceptance rate of every draft (default: the published or the measured rates)
    draft_layers: Given[str] = None  # the self-draft's layers, such as 0-15 (default: all)
    draft_dtype: Literal["same"] | Dtype = "same"  # same: the target's
    draft_weights: Literal["same"] | Scheme = "same"  # linear layers in 8 or 4 bits
    draft_kv_dtype: Literal["same"] | KVDtype = "same"  # entries of the draft's KV cache

    def run(self) -> None:
        """Print tables, then publish the record. Errors: UserError."""
        for name, minimum in {"batches": 1, "contexts": 2, "budgets": 2, "gammas": 1}.items():
            require_at_least(name, min(getattr(self, name)), minimum)
        if self.alpha is not None:
            require_at_least("alpha", self.alpha, 0, 1)
        if (self.machine is None) == (self.records is None):
            where, seen = f"{flag('machine')} and {flag('records')}", "both" if self.machine else "neither"
            what, fix = "costs come from one source", f"give {flag('machine')} NAME or {flag('records')} FILE"
            refuse(where, seen, "one of them", what, fix)
        require_appendable(self.output.output)
        if self.machine is not None:
            return self._predict(self.machine)
        used = {"records", "alpha", "gammas", "output", "target"}
        given = vars(self) | vars(self.target)
        defaults = vars(CostFlags()) | vars(Target())
        if unused := [name for name, value in given.items() if name not in used and value != defaults[name]]:
            note_without_effect(unused, "costs are those of the records")
        cells = recorded_cells(str(self.records), self.alpha)
        record = {"benchmark": "cost_prediction", "records": self.records}
        self._publish(record, cells, f"measured by the runs in {self.records}")

    def _predict(self, name: str) -> None:
        """Predict the costs of a machine, with acceptance given or published."""
        machine, defaults = find_machine(name), vars(Target())
        given = [name for name, value in vars(self.target).items() if value != defaults[name]]
        if unused := [name for name in given if name not in PREDICTED_BY]:
            note_without_effect(unused, "costs are predicted: nothing is loaded or measured")
        source = replace(self.target, load_format="dummy").source()
        target, draft = self.storages(source.config)
        gammas, sizes = sorted(set(self.gammas)), product(*map(sorted, map(set, (self.batches, self.contexts))))
        cells, draft_bytes = list[Cell](), 0.0 if draft[1:3] == target[1:3] else draft.resident_bytes(machine, 0)
        for batch, context in sizes:
            needed = draft_bytes + target.resident_bytes(machine, batch * (context + max(self.budgets)))
            if not (fits := needed <= machine.memory):
                takes = f"{needed / 1e9:.0f} GB on each of {machine.devices} devices, of {machine.memory / 1e9:.0f}"
                say(f"note: {batch} rows of {context} tokens do not fit: weights and KV entries take {takes}")
            for policy, budget in product(self.policies, sorted(set(self.budgets))):
                rate = self.alpha
                if rate is None and self.draft_layers is None:  # rates were published of drafts with all layers
                    rate = published_acceptance(source.name, policy, budget, context)
                if rate is None:
                    continue
                costs = predict_costs(target, draft, machine, batch, context, budget, gammas)
                cells.append(Cell(batch, context, (policy, budget), costs, rate, fits))
        if not cells:
            required, fix = "an acceptance rate of a size and a draft", f"add {flag('alpha')} 0.8"
            refuse("alpha", source.name, required, "no acceptance was published of these", fix)
        published = "published for these contexts (arXiv 2408.11049); drafts without a published rate are left out"
        record = {
            "benchmark": "cost_prediction",
            "model": source.name,
            "predicted_for": name,
            **{name: getattr(target, name) for name in ("dtype", "weights", "kv")},
            "draft_weights": draft.weights or draft.dtype,
            "draft_kv": draft.kv,
            "draft_layers": self.draft_layers,
            "alpha": self.alpha,
            "gammas": gammas,
            "acceptance_of": published if self.alpha is None else "given",
            "rows": rounded([cell.prediction() for cell in cells]),
        }
        head = f"predicted for {name} from its numbers, nothing measured; {source.name}, {target.dtype}"
        self._publish(record, cells, head if self.alpha is not None else f"{head}; acceptance {published}")

    def _publish(self, record: dict[str, Any], cells: Sequence[Cell], head: str) -> None:
        gammas = sorted(set(self.gammas))
        if self.alpha is not None:
            head += f"; acceptance {self.alpha} (--alpha) for every draft and budget, so that the cheapest wins"
        record |= {"best": best_of_each(cells, gammas), "git_commit": git_commit()}
        tables = head, cell_table(cells, gammas), best_table(record["best"])
        publish(self.output.output, record, *(f"\n{table}" for table in tables))

    def storages(self, config: ModelConfig) -> tuple[ModelStorage, ModelStorage]:
        """Return the storage of the target (default: bfloat16) and of the self-draft. Errors: ConfigError."""
        target, layers = self.target, parse_layers(self.draft_layers or f"0-{config.n_layer - 1}", flag("draft_layers"))
        dtype = "bfloat16" if target.dtype == AUTO else target.dtype
        if {dtype, self.draft_dtype} - {"same", *ITEMSIZE}:
            refuse("dtype", "float64", "float32, bfloat16 or float16", "no machine's rate of float64 is known")
        if layers[-1] >= config.n_layer:
            refuse("draft_layers", f"layer {layers[-1]}", f"0 to {config.n_layer - 1}")
        stored = ModelStorage(config, dtype, target.quantize, None if target.kv_dtype == "same" else target.kv_dtype)
        given = zip(stored[1:], (self.draft_dtype, self.draft_weights, self.draft_kv_dtype), strict=True)
        formats: list[Any] = [same if value == "same" else value for same, value in given]
        return stored, ModelStorage(replace(config, n_layer=len(layers)), *formats)


def recorded_cells(path: str, alpha: float | None) -> list[Cell]:
    """Return the costs that the runs in a file measured, with the acceptance rate that they saw unless it is given.

    Errors: ConfigError if there are none, DataError without a file.
    """
    cells = []
    for _, line in read_lines(path):
        # A sweep's lines have records, or null for a run that failed.
        record = (line.get("record", line) if isinstance(line, dict) else None) or {}
        for run, found in chain(_measured(record), *map(_measured, record.get("rows", ()))):
            draft = found["draft_policy"] or found.get("draft") or run.get("drafter") or run["draft"]
            seen = found["accepted_share"] if found["accepted_share"] is not None else run["acceptance_rate"]
            rate = seen if alpha is None else alpha
            if rate is not None:
                size = found["rows"], run.get("prefix_len", record.get("prefix_len"))
                cells.append(Cell(*size, (draft, found["draft_budget"]), costs_of(found), rate))
    if not cells:
        fix = f"make some with --gamma auto {flag('output')} {path}; for random weights, add {flag('alpha')} 0.8"
        refuse("records", path, "records of runs that chose by `auto`", "no measured costs with an acceptance", fix)
    return cells


def _measured(run: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return a run, or a row of reproduce.compare, with its measured costs, which a row has for each repeat. Those of
    older records do not say of which draft and how many rows they are, and are left out."""
    found = chain(*(each if isinstance(each, list) else [each] for each in run.get("measured_costs") or ()))
    return [(run, costs) for costs in found if "rows" in costs]


def costs_of(record: Mapping[str, Any]) -> Costs:
    """Return the costs of a record. Older records lack parts of a round that took no time then."""
    parts = {name: record.get(name, 0.0) for name in MS_OF_ROUNDS}
    return Costs(at=tuple(record["gammas"]), verify_ms=tuple(record["verify_ms"]), **parts)


def best_of_each(cells: Sequence[Cell], gammas: Sequence[int]) -> list[dict[str, Any]]:
    """Return the choice with the largest predicted speedup at each batch and context; gamma 0 is plain decoding, and
    None where memory does not hold the batch."""
    best: dict[tuple[int, int], Any] = {}
    for cell, gamma in product(cells, gammas):
        size, choice = cell[:2], (*cell.draft, gamma, round(cell.speedup(gamma), 4))
        found = max(best.get(size, (None, None, 0, 1.0)), choice, key=itemgetter(-1)) if cell.fits else (None,) * 4
        best[size] = found
    names = "B", "prefix_len", "draft_policy", "draft_budget", "gamma", "predicted_speedup"
    return [dict(zip(names, (*size, *choice), strict=True)) for size, choice in best.items()]


def cell_table(cells: Sequence[Cell], gammas: Sequence[int]) -> str:
    """Return a line for each cell: costs, those of a draft step and a verification in plain steps, and speedups."""
    most = gammas[-1]
    columns = [
        Column(itemgetter(0), "B"),
        Column(itemgetter(1), "context"),
        Column(lambda cell: " ".join(str(part) for part in cell.draft if part is not None), "draft", align="<"),
        Column(lambda cell: cell.costs.plain_ms, "plain ms", ".1f"),
        Column(lambda cell: cell.costs.draft_ms / cell.costs.plain_ms, "draft step", ".2f"),
        Column(lambda cell: cell.costs.verification_ms(most) / cell.costs.plain_ms, f"verify g={most}", ".2f"),
        Column(lambda cell: cell.alpha, "acceptance", ".3f"),
        *(Column(partial(Cell.speedup_text, gamma=gamma), f"g={gamma}") for gamma in gammas),
    ]
    return f"costs, and predicted speedups (below 1 plain decoding wins)\n{console(cells, columns)}"


def best_table(best: Sequence[dict[str, Any]]) -> str:
    none = {0: "none: plain decoding is faster", None: "none: the batch does not fit into memory"}
    drafted = "{draft_policy} {draft_budget}, gamma {gamma}: {predicted_speedup:.2f}"
    said = Column(lambda row: none.get(row["gamma"], drafted).format_map(row), "draft", align="<")
    return f"what pays best\n{console(best, [Column('B', 'B'), Column('prefix_len', 'context'), said])}"
