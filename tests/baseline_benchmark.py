"""Plain autoregressive decoding of long prompts: the speed that speculation has to beat."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import arguments, benchmark, report
from kv_cache.errors import exit_on_user_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=arguments.HelpFormatter)
    arguments.add_common_arguments(parser)
    arguments.add_text_argument(parser)
    arguments.add_sampling_arguments(parser)
    args = parser.parse_args()
    setup = benchmark.prepare(args, arguments.sampling_settings(args))
    prefill_seconds = benchmark.prefill(setup)
    baseline = benchmark.decode(setup, "baseline")
    record = report.make_record("baseline", setup, prefill_seconds=prefill_seconds, baseline=baseline)
    report.finish(setup, record, baseline)


if __name__ == "__main__":
    exit_on_user_error(main)
