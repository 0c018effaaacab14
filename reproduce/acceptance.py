"""Measure how many drafts are accepted, by policy and budget, on several kinds of text.

    python -m reproduce.acceptance --B 8 --prefix_len 7500 --policies streaming snapkv --budgets 64 128 256 512

greedy: the target's text at temperature 0, which loops sooner or later, and a loop is easy to draft; sampled: its text
at --temperature; book: the data set's text behind each prompt, teacher-forced; passkey and multikey: the right answers
to questions about facts that stand early in a prompt, teacher-forced. The share of distinct 4-grams says how much a
text repeats itself. --output gets a record of each measurement as it ends, the last line of standard output has all.
"""

import itertools
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

import bench
from bench.config import ComparedSampling, Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import DraftOptions
from common import cli
from common.errors import ConfigError, flag, require_at_least
from common.jsonl import append_record, publish
from common.say import note_without_effect, say
from common.tables import console
from engine.counts import acceptance_standard_error, acceptance_text, total
from engine.drafters.config import DrafterConfig
from engine.evaluation.teacher_forcing import forced_acceptance
from kv_cache.policy import BudgetedPolicy, policies
from reproduce.helpers.columns import of
from reproduce.helpers.prompts import KINDS, needles

TEXTS = ("greedy", "sampled", "book")
GREEDY, USUAL = Sampling(), ComparedSampling(temperature=0.6)
BUDGETED = {name for name, kind in policies().items() if issubclass(kind, BudgetedPolicy)}
OPTIONS = {option.name for kind in policies().values() for option in fields(kind)}
# Settings that differ between rows.
ROW_SETTINGS = {"draft_policy", "verification", "temperature", *OPTIONS}


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"draft_policy": "--policies", "draft_budget": "--budgets"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    sampling: ComparedSampling = field(default_factory=lambda: USUAL)
    output: Output = field(default_factory=Output)
    draft: DraftOptions = field(default_factory=DraftOptions)
    gamma: int = 3  # tokens drafted per round
    draft_model: Annotated[str | None, arg(help_behavior_hint="(default: the target drafts for itself)")] = None
    """a standalone draft's converted checkpoint"""
    policies: tuple[str, ...] = ("streaming", "snapkv")  # cache policies
    budgets: tuple[int, ...] = (128, 512)  # KV entries per row, of policies that leave some out
    texts: tuple[Literal[(*TEXTS, *KINDS)], ...] = TEXTS  # type: ignore[valid-type]
    """kinds of text to draft"""

    def check(self) -> None:
        require_at_least("budgets", min(self.budgets), 1)
        if BUDGETED.isdisjoint(self.policies) and self.budgets != Flags.budgets:
            note_without_effect(["budgets"], "a policy that keeps all entries has no budget")
        require_at_least("gamma", self.gamma, 1)
        require_at_least("gen_len", self.sizes.gen_len, self.gamma + 2)
        self.target.require_trained("random weights have no acceptance")
        unlike = [x.name for x in fields(Sampling) if getattr(self.sampling, x.name) != getattr(USUAL, x.name)]
        if unlike and "sampled" not in self.texts:
            note_without_effect(unlike, "only sampled text is sampled, which is not among the texts")
        if self.sampling.temperature == 0 and "sampled" in self.texts:
            where, fix = f"{flag('temperature')} with {flag('texts')} sampled", f"leave out {flag('temperature')}"
            raise ConfigError("sampled text needs a temperature", where, 0.0, "> 0", fix)

    def drafts(self) -> list[DrafterConfig]:
        # By default this machine's fastest weights, on which acceptance should not depend.
        shared = {"draft_weights": self.draft.draft_weights or "same"}
        shared |= {} if self.draft_model is None else {"draft": "standalone", "draft_model": self.draft_model}
        pairs = itertools.product([policy for policy in self.policies if policy in BUDGETED], self.budgets)
        chosen: list[dict[str, Any]] = [{"draft_policy": policy, "draft_budget": budget} for policy, budget in pairs]
        chosen += [{"draft_policy": policy} for policy in self.policies if policy not in BUDGETED]
        return self.draft.variants(*(shared | {"gamma": self.gamma} | options for options in chosen))


def main(flags: Flags) -> None:
    flags.check()
    drafts = flags.drafts()
    config = RunConfig(flags.target, flags.text, flags.sizes, sampling=flags.sampling, output=flags.output)
    plan = bench.resolve_several(config, drafts, at_once=1)  # all are checked before anything is loaded
    session = bench.Session.of_plan(plan, n_continued=flags.sizes.gen_len)
    measured = {"prefill_seconds": round(bench.prefill(session), 2)}
    rows, record = list[dict[str, Any]](), dict[str, Any]()
    needle_texts = [text for text in flags.texts if text in KINDS]  # they replace the prefilled prompts
    pairs = [*itertools.product(drafts, [text for text in flags.texts if text not in KINDS])]
    for draft, text in pairs + [(draft, text) for text in needle_texts for draft in drafts]:
        variant = session.variant(draft=draft, sampling=flags.sampling if text == "sampled" else GREEDY)
        rows.append(bench.rounded(_row(variant, text)))
        record = bench.record_of("acceptance", session, measured | {"rows": rows[-1:]}, ROW_SETTINGS)
        append_record(flags.output.output, record)
        kept = " ".join(str(rows[-1][name]) for name in ("draft_policy", "draft_budget") if rows[-1][name])
        say(f"{kept}, {text}: {acceptance_text(rows[-1])}")
    say(console(rows, of("draft_policy draft_budget text acceptance verified mean_accepted_length distinct_4grams")))
    publish(None, record | {"rows": rows})


def _row(session: bench.Session, text: str) -> dict[str, Any]:
    """Measure a draft on one kind of text."""
    drafter = session.drafter()
    if text == "book" or text in KINDS:
        prompts, written = session.prompts, session.continuations
        if text in KINDS:
            assert session.tokenizer is not None, "a model that was trained has text"
            encode = partial(session.tokenizer.encode, add_bos=False)
            prompts, written = needles(text, prompts, encode, session.plan.gen_len)
        each = forced_acceptance(session.runner, drafter, prompts, written)
    else:
        output = bench.decode(session, text, drafter)
        each, written = output.stats.rows, output.tokens
    counts = total(each)
    session.runner.drop_graphs()
    settings = {name: value for name, value in bench.settings_record(session).items() if name in ROW_SETTINGS}
    settings |= {} if settings["draft_policy"] in BUDGETED else {"draft_budget": None}
    names = ("acceptance_rate", "verified", "acceptance_per_position", "mean_accepted_length")
    measured = {name: getattr(counts, name) for name in names}
    measured |= {"acceptance_standard_error": acceptance_standard_error(each)}
    return {"text": text, **settings, **measured, "distinct_4gram_fraction": bench.distinct_4gram_fraction(written)}


if __name__ == "__main__":
    cli.run_alone(main, Flags)
