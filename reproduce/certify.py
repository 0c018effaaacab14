"""Certify at production precision that speculative output parts from plain decoding at near-ties only.

    python reproduce/certify.py --dtype bfloat16 --tokens 20000 --output reproduce/results/certify.jsonl

1. Calibrate: along the book's own text, without any speculation, how far are the logits of forwards of
   gamma + 1 tokens from those of 1-token forwards, each over the cache that they have written themselves? eps is
   the largest difference. If the two choose differently more often than rounding explains, forwards of several
   tokens are wrong, and the certificate fails.
2. Run: self-speculation over rows of different lengths, --tokens in all.
3. Compare: plain decoding in a cache prefilled anew is forced along the emitted tokens and judges each. A token
   that is not its choice is a flip; one that it scores more than 2 eps below its choice is a flip outside
   near-ties, and there must be none. What eps overstates is seen beside it: `gap_change`, the most that a rival
   gained on the top token in calibration, and the counts by that stricter bound (greedy only), which decide nothing.

Temperature 0 certifies the greedy mode. A higher one certifies the coupled mode: scores are then log-probabilities
plus the noise of seed, row and position, and eps is divided by the temperature; a log-softmax shifts all scores
of a token alike, which cancels in a gap. There is no top-k and no top-p here: which ids pass a filter's edge is a
near-tie of another kind. Ends with code 0 if the certificate holds, 1 if not, 2 if it could not be made.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.startup

import torch
from engine.bench.setup import Setup, make_drafter
from engine.bench.setup import prepare as prepare_setup

from common.errors import ConfigError
from common.exit import exit_on_user_error
from common.jsonl import publish
from common.provenance import provenance
from common.say import say
from engine import GenerateOutput
from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.bench.data import make_prompts
from engine.evaluation.certificate import Calibration, Certificate, calibrate, certify, replay
from models import ModelConfig


def parse() -> argparse.Namespace:
    parser = arguments.Parser(description=__doc__.splitlines()[0], formatter_class=arguments.HelpFormatter)
    arguments.add_model_arguments(parser)
    add = parser.add_argument
    add("--tokens", type=int, default=2000, help="tokens to certify, over all rows")
    add("--B", type=int, default=8, help="rows decoded together")
    add("--prefix_len", type=int, default=1000, help="prompt tokens of the longest row")
    add("--gamma", type=int, default=3, help="tokens drafted per round")
    budget = {"dest": "streamingllm_budget", "metavar": "DRAFT_BUDGET", "type": int, "default": 256}
    add("--draft_budget", "--streamingllm_budget", **budget, help="the draft's KV entries per row")
    add("--draft_policy", choices=["streaming", "snapkv"], default="streaming", help="what the draft's cache keeps")
    add("--temperature", type=float, default=0.0, help="0: greedy; higher: the coupled mode")
    add("--seed", type=int, default=0, help="of the coupled mode's noise")
    add("--calibration_positions", type=int, default=256, help="forced tokens per row that measure eps")
    arguments.add_variant_arguments(parser)
    parser.set_defaults(top_k=0, top_p=1.0)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong with the flags that are the certificate's own, or stricter here."""
    settings.require_at_least("tokens", args.tokens, 1)
    settings.require_at_least("B", args.B, 1)
    settings.require_at_least("gamma", args.gamma, 1)  # at gamma 0 there is nothing to certify
    settings.require_at_least("calibration_positions", args.calibration_positions, 1)
    settings.require_at_least("prefix_len", args.prefix_len, args.B + 1)  # rows differ; each has a BOS and some text
    if args.load_format == "dummy":
        raise ConfigError(
            "random weights certify nothing",
            where="--load_format",
            seen="dummy",
            required="a trained model",
            fix="leave out --load_format",
        )


def prepare(args: argparse.Namespace, gen_len: int, n_forced: int) -> tuple[Setup, list[list[int]]]:
    """The set-up of a run of `gen_len` tokens a row, and a text per row: its prompt and `n_forced` tokens more."""
    verification = "greedy" if args.temperature == 0 else "coupled"
    wired = argparse.Namespace(**vars(args), gen_len=max(gen_len, n_forced), verification=verification)
    require_context(wired)
    setup = prepare_setup(wired, settings.sampling_settings(wired), settings.draft_settings(wired))
    assert setup.tokenizer is not None
    books, length = setup.books(), args.prefix_len + n_forced
    wired.gen_len = gen_len
    return setup, make_prompts(books, setup.tokenizer, n_prompts=args.B, prefix_len=length)


def require_context(args: argparse.Namespace) -> None:
    """Raise ConfigError if a row would outgrow the model; a checkpoint that is not there is left to `prepare`."""
    path = Path(args.model)
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    room = ModelConfig.from_json(file).max_context
    needed = args.prefix_len + args.gen_len + args.gamma + 1
    if needed > room:
        raise ConfigError(
            "prompt + new tokens + gamma + 1 exceeds the model's context",
            where="--prefix_len, --gamma, and new tokens per row: --tokens / --B, or --calibration_positions",
            seen=f"{args.prefix_len} + {args.gen_len} + {args.gamma} + 1 = {needed} tokens",
            required=f"<= {room}",
            fix=f"use more rows (--B), or shorten what is too long by {needed - room} tokens a row",
        )


def cut(text: list[int], row: int, args: argparse.Namespace, n_forced: int) -> tuple[list[int], list[int]]:
    """A row's prompt, shorter the later the row, and the tokens that follow it in the book."""
    length = args.prefix_len - row * max(1, args.prefix_len // (4 * args.B))
    return text[:length], text[length : length + n_forced]


def make_record(
    setup: Setup,
    output: GenerateOutput,
    calibration: Calibration,
    result: Certificate,
    strict: Certificate | None,
) -> dict:
    args, counts = setup.args, output.stats.counts
    record = {
        "benchmark": "certify",
        "model": setup.name,
        "dataset": setup.dataset,
        "B": args.B,
        "prefix_len": args.prefix_len,
        "shortest_prompt": min(map(len, setup.prompts)),
        "gen_len": args.gen_len,
        **report.settings_record(setup),
        "eps": calibration.eps,
        "eps_median": calibration.median,
        "gap_change": calibration.gap_change,
        "calibration_positions": calibration.positions,
        "calibration_flips": calibration.flips,
        **dataclasses.asdict(result),
        "calibration_trusted": calibration.trusted,
        "holds": result.holds and calibration.trusted,
        "strict_near_tie_fraction": strict.near_tie_fraction if strict else None,
        "strict_flips_outside_near_ties": strict.flips_outside_near_ties if strict else None,
        "acceptance_rate": counts.acceptance_rate,
        "mean_accepted_length": counts.mean_accepted_length,
        "distinct_4gram_fraction": report.distinct_4gram_fraction(output.tokens),
        **provenance(),
    }
    # Digits that count, not decimals: in float64 eps is of the order of 1e-13.
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in record.items()}


def table(record: dict) -> str:
    gap = record["largest_gap_at_flip"]
    share, outside = record["strict_near_tie_fraction"], record["strict_flips_outside_near_ties"]
    unit = "" if record["verification"] == "greedy" else f" / temperature {record['temperature']}"
    rows = (
        ("eps (median of positions)", f"{record['eps']:.3g} ({record['eps_median']:.3g})"),
        (
            "calibration positions (flips among them)",
            f"{record['calibration_positions']} ({record['calibration_flips']})",
        ),
        ("tokens (rows)", f"{record['tokens']} ({record['rows']})"),
        (f"near-ties: gap <= 2 eps{unit}", f"{record['near_ties']} ({100 * record['near_tie_fraction']:.1f}%)"),
        ("flips", record["flips"]),
        ("largest gap at a flip", "-" if gap is None else f"{gap:.3g}"),
        ("a stricter bound: largest gap change", f"{record['gap_change']:.3g}"),
        ("near-ties, flips outside by that bound", "-" if share is None else f"{100 * share:.1f}%, {outside}"),
        ("rows without a flip", f"{record['rows_without_flip']} of {record['rows']}"),
        ("acceptance rate", f"{record['acceptance_rate'] or 0:.3f}"),
        ("flips outside near-ties", record["flips_outside_near_ties"]),
        (
            "certificate",
            "holds" if record["holds"] else "FAILS" if record["calibration_trusted"] else "FAILS: calibration flips",
        ),
    )
    return "\n".join(f"  {name:<44}{value:>20}" for name, value in rows)


def main() -> None:
    args = parse()
    check(args)
    block, gen_len = args.gamma + 1, math.ceil(args.tokens / args.B)
    n_forced = block * math.ceil(args.calibration_positions / block)
    setup, texts = prepare(args, gen_len, n_forced)
    cuts = [cut(text, row, args, n_forced) for row, text in enumerate(texts)]
    prompts, following = [prompt for prompt, _ in cuts], [tokens for _, tokens in cuts]
    setup = dataclasses.replace(setup, prompts=prompts)
    runner, params = setup.runner, setup.sampling.params

    say(f"calibrating eps: {n_forced} forced tokens in each of {args.B} rows")
    forced = torch.tensor(following, device=runner.device)
    calibration = calibrate(runner.model, runner.cache, prompts, forced, block)
    output = benchmark.decode(setup, "speculation", make_drafter(setup, None))
    say("comparing with plain decoding, one token at a time")
    emitted = torch.tensor(output.tokens, device=runner.device)
    seen = replay(runner.model, runner.cache, prompts, emitted, params)
    result = certify(seen, calibration.eps / (1 if params.greedy else params.temperature))
    # Noise makes rivals of tokens whose logits calibration saw far apart.
    strict = certify(seen, calibration.gap_change / 2) if params.greedy else None

    record = make_record(setup, output, calibration, result, strict)
    weights = f"{record['quantize']} weights, " if record["quantize"] else ""
    headline = (
        f"\n  {record['model']}, {record['device']}, {record['dtype']}, {weights}KV in {record['kv_dtype']}, "
        f"{record['attention']} attention, {record['verification']}\n"
    )
    publish(args.output, record, headline, table(record) + "\n")
    if not record["holds"]:
        sys.exit(1)


if __name__ == "__main__":
    exit_on_user_error(main)
