"""Plain autoregressive decoding of long prompts: the speed that speculation has to beat."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import benchmark, report
from kv_cache.errors import exit_on_user_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    benchmark.add_common_arguments(parser)
    benchmark.add_text_argument(parser)
    setup = benchmark.prepare(parser.parse_args())
    prefill_seconds = benchmark.prefill(setup)
    baseline = benchmark.decode(setup, "baseline")
    record = report.make_record("baseline", setup, prefill_seconds=prefill_seconds, baseline=baseline)
    report.finish(setup, record, baseline)


if __name__ == "__main__":
    exit_on_user_error(main)
