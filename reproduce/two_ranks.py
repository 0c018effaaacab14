"""One process against two ranks on the default model: the same tokens, and the memory of each.

    python reproduce/two_ranks.py [--output reproduce/results/ranks.jsonl]

Self-speculation, a standalone draft on one of the ranks, and the same with coupled samples; the draft is the
model without four layers, converted if it is not there. About four minutes on two cores. Exit code 1 if any
pair of runs differs.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.errors import UserError
from common.jsonl import append_or_put_off, require_appendable
from common.say import say
from engine.bench.config import Output
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from reproduce.sweeping.child import ON_TWO_RANKS, run_child

DRAFT = DEFAULT_CHECKPOINT.parent / "SmolLM2-draft"
SIZE = ["--B", "2", "--prefix_len", "1000", "--gen_len", "32", "--gamma", "3", "--streamingllm_budget", "128"]
MODELS = ["--target", str(DEFAULT_CHECKPOINT / "model.pth"), "--model", str(DRAFT / "model.pth")]
COUPLED = ["--temperature", "0.6", "--verification", "coupled", "--seed", "3"]
# Script, its flags, and those that only two ranks take.
RUNS = (
    ("selfspec", SIZE, ()),
    ("longspec", (*MODELS, *SIZE), ("--draft_ranks", "0")),
    ("longspec", (*MODELS, *SIZE, *COUPLED), ("--draft_ranks", "0")),
)


def run(*argv: str) -> dict:
    """The record that a command prints, if it does; its processes get one CPU thread each."""
    say("running " + " ".join(argv))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_child(argv, Path(folder, "log"), environment={"OMP_NUM_THREADS": "1"})
    if outcome.exit_code != 0:
        seen = str(outcome.error).rpartition("; see ")[0]  # the log is gone with its folder
        fix = "run it by itself and see what it says"
        raise UserError("a command failed", " ".join(argv), seen, "exit code 0", fix)
    return outcome.record or {}


def main(flags: Output) -> None:
    """Make the runs, append and print what they came to."""
    require_appendable(flags.output)
    all_same, put_off = True, list[UserError]()
    run("convert_hf_checkpoint.py", "--drop_layers", "4-5,16-17", "--out_dir", str(DRAFT))
    for script, own, on_two in RUNS:
        command = [f"tests/{script}_benchmark.py", *own]
        one, two = run(*command), run(*ON_TWO_RANKS, *command, "--rank_group", "0", "1", *on_two)
        same = one["tokens_sha256"] == two["tokens_sha256"]
        all_same &= same
        for record in (one, two):
            append_or_put_off(flags.output, record, put_off)
        mib = [round(peak / 2**20) for record in (one, two) for peak in record["peak_memory_bytes_per_rank"]]
        print(
            f"{script}, {one['verification']}: {'the same tokens' if same else 'OTHER TOKENS'}; acceptance "
            f"{one['acceptance_rate']} and {two['acceptance_rate']}; peak {mib[0]} MiB, on two ranks {mib[1:]} MiB"
        )
    if put_off:
        raise put_off[0]
    if not all_same:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Output)
