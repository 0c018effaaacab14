"""Certify at production precision that speculative output differs from plain decoding at near-ties only.

    python -m reproduce.certify --dtype bfloat16 --tokens 20000 --output reproduction/certify.jsonl

docs/lossless.md, "The certificate", describes calibration and comparison. Temperature 0 certifies the greedy mode, any
higher temperature the coupled mode. Exit code 0 if the certificate holds, 1 if not, 2 if it could not be made.
"""

import math
import sys
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from tyro.conf import arg

import bench
from bench.config import BatchSize, Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import BUDGET, DraftOptions
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from common.say import say
from engine.controller import Fixed
from engine.evaluation.certificate import calibrate, certify, replay


@dataclass(frozen=True)
class Flags:
    FLAGS: ClassVar[dict[str, str]] = {"gen_len": "--tokens / --B or --calibration_positions"}

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    draft: DraftOptions = field(default_factory=DraftOptions)
    output: Output = field(default_factory=Output)
    tokens: int = 2000  # tokens to certify, over all rows
    B: BatchSize = 8  # rows decoded together
    prefix_len: int = 1000  # prompt tokens of the longest row
    gamma: int = 3  # tokens drafted per round
    draft_budget: Annotated[int, arg(aliases=BUDGET.aliases)] = 256  # the draft's KV entries per row
    draft_policy: str = "streaming"  # what the draft's cache keeps
    temperature: float = 0.0  # 0: greedy; higher: the coupled mode
    seed: Annotated[int | None, arg(help_behavior_hint="(default: 0)")] = None  # of the coupled mode's noise
    calibration_positions: int = 256  # forced tokens per row that measure eps

    @property
    def gen_len(self) -> int:
        return math.ceil(self.tokens / self.B)

    @property
    def n_forced(self) -> int:
        """Return the number of forced tokens per row, in whole blocks."""
        return math.ceil(self.calibration_positions / (self.gamma + 1)) * (self.gamma + 1)

    def config(self) -> RunConfig:
        """Return the run, with room for the forced tokens. Errors: ConfigError."""
        for name in ("tokens", "B", "gamma", "calibration_positions"):  # at gamma 0 there is nothing to certify
            require_at_least(name, getattr(self, name), 1)
        require_at_least("prefix_len", self.prefix_len, self.B + 1)  # rows differ; each has a BOS and some text
        self.target.require_trained()
        sizes = Sizes(self.B, self.prefix_len, max(self.gen_len, self.n_forced))
        mode = "coupled" if self.temperature else "greedy"
        sampling = Sampling(self.temperature, seed=self.seed, verification=mode)
        chosen = {name: getattr(self, name) for name in ("gamma", "draft_policy", "draft_budget")}
        draft = self.draft.config(**chosen)
        return RunConfig(self.target, self.text, sizes, sampling=sampling, output=self.output, draft=draft)


def certified(session: bench.Session, following: list[list[int]]) -> dict[str, Any]:
    """Calibrate, decode and compare, and return the record. following: tokens of the data set after each prompt."""
    runner, params, prompts = session.runner, session.plan.sampling, session.prompts
    say(f"calibrating eps: {len(following[0])} forced tokens in each of {len(prompts)} rows")
    forced = torch.tensor(following, device=runner.device)
    calibration = calibrate(runner.model, runner.cache, prompts, forced, session.plan.gamma + 1)
    output = bench.decode(session, "speculation", Fixed(session.drafter()))
    say("comparing with plain decoding, one token at a time")
    seen = replay(runner.model, runner.cache, prompts, torch.tensor(output.tokens, device=runner.device), params)
    result = certify(seen, calibration.eps / (1 if params.greedy else params.temperature))
    measured = {"shortest_prompt": min(map(len, prompts)), "eps": calibration.eps}
    measured |= {"calibration_positions": calibration.positions, "calibration_flips": calibration.flips}
    measured |= {**asdict(result), "calibration_trusted": calibration.trusted}
    measured |= {"holds": result.holds and calibration.trusted}
    measured |= {name: getattr(output.stats.counts, name) for name in ("acceptance_rate", "mean_accepted_length")}
    measured["distinct_4gram_fraction"] = bench.distinct_4gram_fraction(output.tokens)
    record = bench.record_of("certify", session, measured)
    # Five significant digits: in float64 eps is of the order of 1e-13.
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in record.items()}


SUMMARY = """  calibration: eps {eps:.3g}, {calibration_flips} flips in {calibration_positions} positions
  {tokens} tokens in {rows} rows, {near_ties} near-ties; {flips} flips, {flips_outside_near_ties} outside near-ties
  the certificate {verdict}
"""


def main(flags: Flags) -> None:
    session = bench.Session.of_plan(bench.resolve(flags.config()), n_continued=flags.n_forced)
    texts = [prompt + rest for prompt, rest in zip(session.prompts, session.continuations, strict=True)]
    shorter = max(1, flags.prefix_len // (4 * flags.B))
    cut = [(text, flags.prefix_len - row * shorter) for row, text in enumerate(texts)]
    session = session.variant(gen_len=flags.gen_len, prompts=[text[:length] for text, length in cut])
    record = certified(session, [text[length : length + flags.n_forced] for text, length in cut])
    fails = "FAILS" if record["calibration_trusted"] else "FAILS: calibration flips"
    publish(flags.output.output, record, SUMMARY.format(**record, verdict="holds" if record["holds"] else fails))
    if not record["holds"]:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main, Flags)
