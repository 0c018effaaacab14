"""A cell for reproduce/kill_sweep.py: sleeps a while, then prints a record that depends on its flags alone."""

from __future__ import annotations

import argparse
import hashlib
import json
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="how long to sleep")
    parser.add_argument("--size", type=int, required=True, help="letters in the record")
    parser.add_argument("--tag", required=True, help="by which this process is found")
    args = parser.parse_args()
    time.sleep(args.seconds)
    digest = hashlib.sha256(str(args.index).encode()).hexdigest()
    print(json.dumps({"index": args.index, "text": (digest * (args.size // len(digest) + 1))[: args.size]}))


if __name__ == "__main__":
    main()
