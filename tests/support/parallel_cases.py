"""Tiny runs that a sharded model repeats token for token."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common.errors import RankError
from engine import ModelRunner, SamplingParams, SelfSpeculation
from engine.controller import PLAIN, RoundChoice
from engine.drafters import Drafter
from engine.parallel.ranks import Ranks, model_ranks, start_ranks
from engine.remote_runner import RemoteRunner
from kv_cache import FullKVCache, KVCache
from models import ModelConfig, load_model
from models.checkpoints.loading import save_checkpoint
from models.llama import select_layers
from models.tensor_parallel import ModelRanks
from tests.support.controllers import SCHEDULES, Scripted, scheduled
from tests.support.drafters import Drafters
from tests.support.policies import POLICIES, SELF_DRAFT_POLICIES, Size, generate_selecting
from tests.support.recorded_graph import RecordedGraphs
from tests.support.tiny import TINY, tiny_model

GROUP_SIZES = (1, 3, 4, 7)
MODES = ("greedy", "coupled", "rejection")
STANDALONE = ("streaming, positions in the cache", "snapkv", "quantized")
DRAFTS = (
    *("none", "ngram", "suffix", *(name for name in SELF_DRAFT_POLICIES if name != "full")),
    *(f"standalone, {policy}" for policy in STANDALONE),
    *("medusa", "eagle-1, streaming", "eagle-3, full", "P-EAGLE, full", "dflash, streaming", "some layers"),
    "dflash 2, streaming",
    *("combined, standalone, streaming", "changing", "speculated, ngram", "speculated, streaming", "speculated, model"),
)
SCRIPT = (RoundChoice(0, 3), PLAIN, RoundChoice(1, 2), PLAIN, RoundChoice(0, 1), RoundChoice(2, 3))
APART = "streaming"  # the draft of the case whose ranks round apart, and disagree
N_ROWS, GAMMA = 3, 3
SIZE = Size(N_ROWS, longest=80, n_kept=4, window=8, dtype=torch.float64)
# 5 KV heads, 61 ids and 50 units do not divide by 2 or 4; the draft's vocabulary is padded, its heads are 4.
DRAFT_CONFIG = replace(TINY, n_layer=1, n_head=8, n_kv_head=4, head_dim=4, vocab_size=64)


@dataclass(frozen=True)
class Case:
    """A run. `subset` picks the ranks that hold a standalone draft; `reverse` numbers the shards backwards.

    is_captured: rounds and their collectives are recorded and replayed on several ranks, and on a single rank where
    called rounds may draft less.
    """

    group_size: int
    mode: str
    draft: str
    subset: int
    reverse: bool
    is_captured: bool = False
    schedule: str = ""

    @property
    def name(self) -> str:
        return f"{self.mode}, groups of {self.group_size}, draft {self.draft}"

    def draft_ranks(self, n_ranks: int) -> tuple[int, ...]:
        """Return all ranks, the leader alone, or some ranks without the leader."""
        subsets = (range(n_ranks), (0,), (n_ranks - 1,), range(1, n_ranks))
        return tuple(subsets[self.subset]) or (0,)

    def config(self) -> ModelConfig:
        n_head = 5 * self.group_size
        varied = {"tie_embeddings": self.group_size == 3, "qkv_bias": self.group_size == 4}
        if self.group_size == 7:
            varied |= {"qk_norm": True, "wo_bias": True, "mlp_bias": True, "unrotated_layers": (0,)}
        if self.group_size == 3:
            varied |= {"n_expert": 4, "n_expert_per_token": 2, "normalise_experts": True}
        return replace(TINY, n_head=n_head, n_kv_head=5, ffn_dim=50, **varied)


def cases_of(selection: str) -> list[Case]:
    """Return "every case": every group size in every mode with every drafter, captured in some modes and called in
    others, with random subsets and orders of ranks; or "every drafter" with modes and group sizes in turn."""
    rng, cases = random.Random(0), {}
    for turn in product(GROUP_SIZES, MODES, DRAFTS):
        group_size, mode, draft = turn
        subset, reverse = rng.randrange(4), rng.random() < 0.3
        is_captured = (MODES.index(mode) + DRAFTS.index(draft)) % 2 == 0
        # A captured model with text drafts always drafts, and so counts more drafts than a single process. Experts on
        # a CPU read counts on the host, which a recorded round cannot.
        is_captured = is_captured and not draft.startswith("combined") and group_size != 3
        cases[turn] = Case(*turn, subset, reverse, is_captured, rng.choice(["", *SCHEDULES]))
    if selection == "every case":
        return list(cases.values())
    return [cases[turn] for turn in zip(cycle(GROUP_SIZES), cycle(MODES), DRAFTS, strict=False)]


def write_checkpoints(folder: Path) -> None:
    """Write a random model for each group size, and the draft, as model.pth files."""
    configs = {str(size): Case(size, "", "", 0, False).config() for size in GROUP_SIZES} | {"draft": DRAFT_CONFIG}
    for seed, (name, config) in enumerate(configs.items()):
        (folder / name).mkdir()
        state_dict = tiny_model(config, seed=seed).state_dict()
        save_checkpoint(folder / name / "model.pth", config, state_dict)


def run_case(case: Case, folder: Path, ranks: Ranks) -> dict:
    """Return the tokens and counts of a case, run by all ranks together."""
    order = tuple(range(ranks.size))
    holders = model_ranks(ranks, order[::-1] if case.reverse else order)
    model = _load(folder / str(case.group_size), case.config(), holders)
    new_graphs = RecordedGraphs if case.is_captured and (ranks.size > 1 or case.schedule) else None
    runner = ModelRunner(model, _cache(model.config), prefill_chunk=16, ranks=ranks, new_graphs=new_graphs)
    rng = random.Random(case.name)
    prompts = [[rng.randrange(TINY.vocab_size) for _ in range(rng.randint(1, 24))] for _ in range(4)]
    temperature = 0.0 if case.mode == "greedy" else 0.8
    kinds = ("snapkv", "standalone, streaming", "ngram") if case.draft == "changing" else (case.draft,)
    drafters = [_drafter(case, kind, folder, runner) for kind in kinds]
    drafts = {"drafter": None, "controller": Scripted(drafters, SCRIPT)} if len(kinds) > 1 else {"drafter": drafters[0]}
    limits = [rng.randint(1, 7) for _ in prompts]
    sampling = [SamplingParams(temperature, seed=seed) for seed in range(len(prompts))]
    settings = {"max_new_tokens": limits, "sampling": sampling, "verification": case.mode}
    out = generate_selecting(runner, prompts, **settings, **drafts)
    return {"tokens": out.tokens, "counts": [asdict(row) for row in out.stats.rows]}


def _drafter(case: Case, kind: str, folder: Path, runner: ModelRunner) -> Drafter | None:
    ranks = runner.ranks
    if kind == "some layers":
        draft = select_layers(runner.model, [1])
        drafter = SelfSpeculation(runner, _cache(draft.config, "streaming"), GAMMA, draft, [1])
        return scheduled(drafter, case.schedule, N_ROWS)

    def new_runner(policy: str) -> ModelRunner | RemoteRunner:
        holders = model_ranks(ranks, case.draft_ranks(ranks.size))
        if not holders.holds:
            return RemoteRunner(DRAFT_CONFIG, torch.float64, N_ROWS, ranks, holders)
        model = _load(folder / "draft", DRAFT_CONFIG, holders)
        return ModelRunner(model, _cache(model.config, policy), ranks=ranks)

    new_drafter = Drafters(runner, GAMMA, SIZE, outer="retrieval", new_runner=new_runner)
    return new_drafter(f"{kind}: {case.schedule}")


def _load(path: Path, config: ModelConfig, holders: ModelRanks):
    exchange = holders if len(holders.ranks) > 1 or holders.gather_group is not None else None
    return load_model(path, config=config, dtype=torch.float64, exchange=exchange)


def _cache(config: ModelConfig, policy: str = "full") -> KVCache:
    return POLICIES[policy].make(config, SIZE)


def run_cases(folder: Path, output: Path, selection: str) -> None:
    """Run the cases on each rank; the leader writes all results."""
    cases, ranks = cases_of(selection), start_ranks("cpu", timeout_seconds=120)
    # Comparing digests takes longer than the rest of so small a round.
    checked = replace(ranks, check=True)
    here = {case.name: run_case(case, folder, ranks if i % 5 else checked) for i, case in enumerate(cases)}
    by_rank = ranks.all_gather_object(here)
    apart = next(case for case in cases if case.draft == APART)
    with on_last_rank(ranks, ModelRanks, "all_reduce", skewed):
        rounding_apart = ranks.all_gather_object(run_case(apart, folder, checked))
    with on_last_rank(ranks, Ranks, "broadcast", changed), pytest.raises(RankError) as disagree:
        run_case(apart, folder, checked)
    results = {
        "cases": {name: [theirs[name] for theirs in by_rank] for name in here},
        "apart": (apart.name, rounding_apart),
        "disagree": ranks.all_gather_object(str(disagree.value)),
        "logits": {size: packed_logits(size, folder, model_ranks(ranks, range(ranks.size))) for size in GROUP_SIZES},
    }
    if ranks.leads:
        output.write_text(json.dumps(results))


@contextmanager
def on_last_rank(ranks: Ranks, owner: type, name: str, replace: Callable[..., Any]) -> Iterator[None]:
    """Replace a method by `replace(method)` on the last rank."""
    method = getattr(owner, name)
    with patch.object(owner, name, replace(method) if ranks.rank == ranks.size - 1 else method):
        yield


def skewed(exact: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return sums that are one unit in the last place too large, as other hardware may give."""
    return lambda ranks, x: (total := exact(ranks, x)).nextafter(torch.full_like(total, torch.inf))


def changed(broadcast: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return decisions of which one changes a row's next token."""
    rounds = count()

    def broadcast_otherwise(ranks: Ranks, decide: Callable[[], torch.Tensor], *shape: int) -> torch.Tensor:
        tensor = broadcast(ranks, decide, *shape)
        if len(shape) == 2 and next(rounds) == 3:
            tensor[:, 2] += 1
        return tensor

    return broadcast_otherwise


def packed_logits(group_size: int, folder: Path, holders: ModelRanks | None) -> list:
    """Return logits of a float32 model, whose linear layers are packed where the processor can."""
    config = Case(group_size, "", "", 0, False).config()
    model = load_model(folder / str(group_size), config=config, exchange=holders)
    tokens = torch.arange(18).view(2, 9)
    cache = FullKVCache(model.config, 2, 9)
    with torch.inference_mode():
        return model(tokens, torch.arange(9).expand(2, -1), cache).tolist()
