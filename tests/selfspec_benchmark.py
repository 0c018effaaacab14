"""Self-speculation: the target drafts over a small KV cache and verifies over the full one.

Other drafters that need no second model run here too (--draft).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupts

from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench import record as report
from engine.bench.setup import prepare
from engine.parallel.launch import run_on_ranks


def main() -> None:
    parser = arguments.Parser(description=__doc__, formatter_class=arguments.HelpFormatter)
    arguments.add_common_arguments(parser)
    arguments.add_text_argument(parser)
    arguments.add_rank_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    arguments.add_pass_arguments(parser)
    args = parser.parse_args()
    setup = prepare(args, settings.sampling_settings(args), settings.draft_settings(args))
    report.finish("selfspec", setup, benchmark.speculation_passes(setup))


if __name__ == "__main__":
    run_on_ranks(main)
