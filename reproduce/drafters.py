"""Measure what drafters gain on one text: plain decoding and each drafter in turns, from one prefilled state.

    python -m reproduce.drafters --B 1 --prefix_len 2000 --gen_len 128 --output reproduction/drafters.jsonl
    python -m reproduce.drafters --B 1 --prefix_len 2000 --temperature 0.6 --drafters self ngram
    python -m reproduce.drafters --B 1 --prompts reproduce/prompts/copying.jsonl --drafters ngram suffix+self

Every repeat has new drafters; figures are medians over repeats. `drafting_ms` is the mean time of a round before the
target verifies, on the device and the host.
"""

from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import bench
from bench.config import Rows, RunConfig, Sizes, Text
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from common.tables import console
from reproduce.helpers.columns import of
from reproduce.helpers.in_turns import Contender, in_turns
from reproduce.helpers.records import Record
from reproduce.spec_bench import PLAIN, Drafters, open_session

COLUMNS = "drafter gamma acceptance mean_accepted_length drafting_ratio speedup wall_speedup identical"


@dataclass(frozen=True)
class Flags(Drafters):
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    prompts: str | None = None  # whole prompts, like in the benchmarks; by default stretches of the data set
    repeats: int = 3  # runs of each drafter, every second time in reverse order


def row_of(contender: Contender) -> Record:
    phases = [(run.phases["resume"], run.phases["draft"]) for run in contender.outputs if run.phases]
    seconds = [sum(parts) for each in phases for parts in zip(*each, strict=True)]
    drafting_ms = round(1e3 * fmean(seconds), 4) if seconds else None
    return {"drafter": contender.name, "drafting_ms": drafting_ms, **contender.row()}


def main(flags: Flags) -> None:
    require_at_least("repeats", flags.repeats, 1)
    configs, rows = flags.configs(), Rows(prompts=flags.prompts)
    run = RunConfig(flags.target, flags.text, flags.sizes, rows, sampling=flags.sampling, output=flags.output)
    session = open_session(run, list(configs.values()))
    bench.prefill(session)
    contenders = [plain := Contender(PLAIN, session.variant(draft=None))]
    for name, draft in configs.items():
        contenders.append(Contender(name, session.variant(draft=draft), plain, [], {"gamma": draft.gamma}))
    texts = bench.decode(plain.session, PLAIN).tokens  # an oracle drafts these

    def run_anew(contender: Contender) -> None:
        contender.drafters[:] = contender.session.drafters(texts) if contender.plain else []
        bench.warm_up(contender.session, contender.drafters)
        contender.run()
        contender.drafters.clear()

    in_turns({contender.name: partial(run_anew, contender) for contender in contenders}, flags.repeats)
    found = [row_of(contender) for contender in contenders if contender.plain]
    measured = {"text": flags.prompts or session.plan.dataset, "repeats": flags.repeats, "rows": found}
    record = bench.record_of("drafters", plain.session, measured, without=("gamma", "draft_budget"))
    publish(flags.output.output, record, console(found, of(COLUMNS)))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
