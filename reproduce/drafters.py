"""What every drafter gains on one text: plain decoding and each of them from one prefilled state, in both orders.

    python reproduce/drafters.py --B 1 --prefix_len 2000 --gen_len 128 --output reproduction/drafters.jsonl
    python reproduce/drafters.py --B 1 --prefix_len 2000 --temperature 0.6 --drafters self ngram
    python reproduce/drafters.py --B 1 --prompts reproduce/prompts/copying.jsonl --drafters ngram suffix+self

Each repeat has drafters that know nothing of the last; medians are over repeats. A draft's cost is all that a round
does before the target verifies, also on the host; the mean over rounds.
"""

from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Annotated

from tyro.conf import arg

import bench
from bench.config import Rows, RunConfig, Sizes, Text
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from common.tables import console
from reproduce.gamma_cell import Contender
from reproduce.paper.columns import of, rows_of
from reproduce.paper.in_turns import in_turns
from reproduce.paper.published import Record
from reproduce.spec_bench import PLAIN, Drafters, open_session


@dataclass(frozen=True)
class Flags(Drafters):
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    prompts: Annotated[str | None, arg(help_behavior_hint="(default: stretches of the data set)")] = None
    """whole prompts, as of the benchmarks"""
    repeats: int = 3  # how often all are run, every other time in reverse order


def row_of(one: Contender) -> Record:
    phases = [(run.phases["resume"], run.phases["draft"]) for run in one.outputs if run.phases]
    seconds = [sum(parts) for each in phases for parts in zip(*each, strict=True)]
    return {"drafter": one.name, "drafting_ms": round(1e3 * fmean(seconds), 4) if seconds else None, **one.row()}


def main(flags: Flags) -> None:
    require_at_least("repeats", flags.repeats, 1)
    configs, rows = flags.configs(), Rows(prompts=flags.prompts)
    run = RunConfig(flags.target, flags.text, flags.sizes, rows, sampling=flags.sampling, output=flags.output)
    session = open_session(run, list(configs.values()))
    bench.prefill(session)
    contenders = [plain := Contender(PLAIN, session.variant(draft=None))]
    for name, draft in configs.items():
        contenders.append(Contender(name, session.variant(draft=draft), plain, [], {"gamma": draft.gamma}))
    texts = bench.decode(plain.session, PLAIN).tokens  # what an oracle drafts

    def run_anew(one: Contender) -> None:
        one.drafters[:] = one.session.drafters(texts) if one.plain else []
        bench.warm_up(one.session, one.drafters)
        one.run()
        one.drafters.clear()

    in_turns({one.name: partial(run_anew, one) for one in contenders}, flags.repeats)
    found = {"text": flags.prompts or session.plan.dataset, "repeats": flags.repeats}
    found["rows"] = [row_of(one) for one in contenders if one.plain]
    record = bench.record_of("drafters", plain.session, found, without=("gamma", "draft_budget"))
    publish(flags.output.output, record, console(rows_of([record]), of("drafters")))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
