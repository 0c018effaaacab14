"""Measure speedups of fixed drafts and of `auto`, interleaved with plain decoding from one prefilled state.

    python -m reproduce.gamma_cell --B 4 --prefix_len 1000 --gammas 1 3 5 --budgets 128 512 --repeats 3

`auto` chooses gamma at the largest budget, `auto budget` chooses both, as `--gamma auto --draft_budget auto` does.
Costs and acceptance are measured right before each of their runs, on the same prompts. Speedups leave out the time of
measuring them (`measured_costs_seconds`).
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import bench
from bench.config import AUTO, ComparedSampling, Output, RunConfig, Sizes, Target, Text
from bench.draft_flags import DraftOptions
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from reproduce.helpers.cost_errors import AUTO_BUDGET
from reproduce.helpers.in_turns import Contender, in_turns


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"gamma": "--gammas", "draft_budget": "--budgets"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    output: Output = field(default_factory=Output)
    draft: DraftOptions = field(default_factory=DraftOptions)
    gammas: tuple[int, ...] = (1, 3, 5)  # fixed gammas
    budgets: tuple[int, ...] = (128, 512)  # KV entries of the draft
    draft_policy: str = "streaming"  # what the draft's cache keeps
    fixed: bool = False  # without the auto modes
    repeats: int = 3  # interleaved runs of each way

    def check(self) -> None:
        for name in ("gammas", "budgets"):
            require_at_least(name, min(getattr(self, name)), 1)
        require_at_least("gen_len", self.sizes.gen_len, 2)
        require_at_least("repeats", self.repeats, 1)

    def drafts(self) -> dict[str, dict[str, Any]]:
        """Return the options of each draft by its name. A value that is given twice counts once."""
        budgets, gammas = sorted(set(self.budgets)), sorted(set(self.gammas))
        ways: dict[str, tuple] = {f"b={b} g={g}": (b, g) for b, g in itertools.product(budgets, gammas)}
        if not self.fixed:
            ways |= {AUTO: (budgets[-1], AUTO), AUTO_BUDGET: (AUTO, AUTO)}
        shared = {"draft_policy": self.draft_policy}
        return {name: shared | {"draft_budget": budget, "gamma": gamma} for name, (budget, gamma) in ways.items()}


def main(flags: Flags) -> None:
    flags.check()
    chosen = flags.drafts()
    drafts = flags.draft.variants(*chosen.values())
    config = RunConfig(flags.target, flags.text, flags.sizes, sampling=flags.sampling, output=flags.output)
    session = bench.Session.of_plan(bench.resolve_several(config, drafts))
    prefill_seconds = bench.prefill(session)
    contenders = [plain := Contender("plain", session.variant(draft=None))]
    for (name, options), draft in zip(chosen.items(), drafts, strict=True):
        drafting = session.variant(draft=draft)
        contenders.append(Contender(name, drafting, plain, drafting.drafters(), options))
    for contender in contenders:
        bench.warm_up(contender.session, contender.drafters)
    in_turns({contender.name: contender.run for contender in contenders}, flags.repeats)
    rows = [contender.row() for contender in contenders]
    measured = {"repeats": flags.repeats, "prefill_seconds": round(prefill_seconds, 2), "rows": rows}
    publish(flags.output.output, bench.record_of("gamma_cell", session, measured, without=("gamma", "draft_budget")))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
