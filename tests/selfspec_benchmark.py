"""Self-speculation: the target drafts over a small KV cache and verifies over the full one.

Other drafters that need no second model run here too (--draft).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report
from engine.timing import PhaseTimer
from kv_cache.errors import exit_on_user_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=arguments.HelpFormatter)
    arguments.add_common_arguments(parser)
    arguments.add_text_argument(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    arguments.add_pass_arguments(parser)
    args = parser.parse_args()
    setup = benchmark.prepare(args, arguments.sampling_settings(args), arguments.draft_settings(args))

    prefill_seconds = benchmark.prefill(setup)
    baseline = None if args.no_baseline else benchmark.decode(setup, "baseline")
    drafter = benchmark.make_drafter(setup, baseline)
    speculative = benchmark.decode(setup, "speculation", drafter)
    timed = None
    if args.benchmark:
        timer = PhaseTimer(setup.runner.device)
        timed = timer, benchmark.decode(setup, "phase times", drafter, timer)

    record = report.make_record(
        "selfspec",
        setup,
        prefill_seconds=prefill_seconds,
        baseline=baseline,
        speculative=speculative,
        timed=timed,
    )
    report.finish(setup, record, speculative)


if __name__ == "__main__":
    exit_on_user_error(main)
