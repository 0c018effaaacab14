"""What damaged checkpoints come to: each kind of damage to each file of a tiny random model, converted and loaded.

    python reproduce/corruptions.py [--repeats 6] [--seed 0] [--output reproduction/corruptions.jsonl]

A case is refused (by the errors that a user is meant to see), accepted with the very weights, configuration and
tokenizer of before ("harmless"), accepted with others ("wrong"), or it crashes. With a manifest nothing that was
changed may be accepted; without one, nothing with wrong values but flipped or zeroed tensor data. Nothing may crash.
The exit code is 1 if that does not hold.

Some damage cannot be seen without a manifest and is tried with one only: values and names of keys in config.json,
tokenizer.json or a GGUF's metadata that still make sense (another rope_theta, another token). Nor is a whole
checkpoint of another model damage. The last line on stdout is the table as one JSON object.
"""

import io
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests: the modules that damage checkpoints

from common import cli
from common.errors import UserError
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from common.tables import Column, console
from models.checkpoints.manifest import MANIFEST

TEXT = "Some text, and that is to be tokenised."
OUTCOMES = ("refused", "harmless", "wrong", "crashed")
DATA_KINDS = ("flip in data", "zero in data", "NaN or infinity")
ANYWHERE = ("flip elsewhere", "zero elsewhere", "insert", "delete")
MAY_BE_WRONG = DATA_KINDS[:2]
WEIGHTS = (
    ("safetensors", "model.safetensors"),
    ("sharded", "model-00001-of-00002.safetensors"),
    ("bin", "pytorch_model.bin"),
    ("gguf", "tiny.gguf"),
    ("converted", "model.pth"),
)
COLUMNS = (
    *(Column(name, name, align="<") for name in ("file", "kind")),
    Column("manifest", "manifest", lambda value: "yes" if value else "no"),
    *(Column(name, name, lambda count: str(count or "-")) for name in ("cases", *OUTCOMES)),
)


@dataclass(frozen=True)
class Flags:
    repeats: int = 6  # cases of each kind for each file
    seed: int = 0  # of the places and bits
    output: str = str(ROOT / "reproduction" / "corruptions.jsonl")  # for the record


class Case(NamedTuple):
    """One kind of damage to one file of a folder that `make_folders` made; `number` tells repeats apart."""

    folder: str
    file: str
    kind: str
    manifest: bool
    number: int

    def allows(self, seen: str) -> bool:
        if self.manifest:
            return seen == "refused"
        return seen in ("refused", "harmless") or (seen == "wrong" and self.kind in MAY_BE_WRONG)


def all_cases(repeats: int) -> Iterator[Case]:
    """Every kind of damage to every file, `repeats` times at other places; every edit of JSON once."""
    from checkpoint_damage import EDITS

    texts = [("sharded", "model.safetensors.index.json")]
    texts += [(folder, file) for folder in ("safetensors", "converted") for file in EDITS if "index" not in file]
    for (folder, file), manifest in itertools.product([*WEIGHTS, *texts], (True, False)):
        if file == MANIFEST and not manifest:
            continue
        is_fact = file == "tokenizer.json" or (folder, file) == ("safetensors", "config.json")
        kinds = {
            "truncate": repeats,
            "append": repeats,
            "drop": int(file != MANIFEST),
            **dict.fromkeys(() if is_fact and not manifest else ANYWHERE, repeats),
            "swap": int(manifest or not (is_fact or folder == "gguf")),  # a GGUF is a whole model
            **dict.fromkeys(DATA_KINDS if (folder, file) in WEIGHTS else (), repeats),
            "edit": len(EDITS.get(file, ())),
        }
        for kind, count in kinds.items():
            yield from (Case(folder, file, kind, manifest, number) for number in range(count))


def use(folder: Path) -> list[Any]:
    """All of a checkpoint that a run uses, converted first if need be, as values that compare by ==."""
    from convert_hf_checkpoint import convert
    from models import load_model
    from models.checkpoints.tokenizer import load_tokenizer

    if folder.name != "converted":
        convert(folder, folder / "out")
        folder = folder / "out"
    model, tokenizer = load_model(folder, prepack=False), load_tokenizer(folder)
    weights = {name: weight.numpy().tobytes() for name, weight in model.state_dict().items()}
    return [model.config, weights, tokenizer.encode(TEXT), tokenizer.pieces()]


@contextmanager
def quietly() -> Iterator[Path]:
    """A folder for the time being, in which nothing is said."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield Path(folder)


def outcome(case: Case, made: Path, wanted: list[Any], seed: int) -> str:
    """`refused`, `harmless`, `wrong`, or `crashed` with the exception."""
    from checkpoint_damage import damage

    with quietly() as scratch:
        folder = shutil.copytree(made / "model" / case.folder, scratch / case.folder)
        other, rng = made / "other" / case.folder / case.file, random.Random(f"{seed} {case}")
        damage(folder / case.file, case.kind, other, case.number, case.manifest, rng)
        if not case.manifest:
            (folder / MANIFEST).unlink()
        try:
            return "harmless" if use(folder) == wanted else "wrong"
        except UserError:
            return "refused"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the tokenizers package is no Exception
            return f"crashed: {type(error).__name__}: {error}"


def run(cases: Sequence[Case], seed: int) -> list[tuple[Case, str]]:
    """What each case came to."""
    from checkpoint_folders import HF_CONFIG, OTHER, make_folders

    with quietly() as made:
        make_folders(made / "model", HF_CONFIG)
        make_folders(made / "other", OTHER)
        names = {case.folder for case in cases}
        wanted = {name: use(shutil.copytree(made / "model" / name, made / "whole" / name)) for name in names}
        return [(case, outcome(case, made, wanted[case.folder], seed)) for case in cases]


def tabulate(results: Sequence[tuple[Case, str]]) -> list[dict[str, Any]]:
    """Counts of each outcome by file, kind and manifest."""
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for case, seen in results:
        head = {"file": f"{case.folder}: {case.file}", "kind": case.kind, "manifest": case.manifest}
        row = rows.setdefault(tuple(head.values()), head | dict.fromkeys(("cases", *OUTCOMES), 0))
        for name in ("cases", seen.partition(":")[0]):
            row[name] += 1
    return list(rows.values())


def main(flags: Flags) -> None:
    """Damage, print the table and record it."""
    Path(flags.output).parent.mkdir(parents=True, exist_ok=True)
    require_appendable(flags.output)
    started = time.monotonic()
    results = run(list(all_cases(flags.repeats)), flags.seed)
    rows, broken = tabulate(results), [f"{case}: {seen}" for case, seen in results if not case.allows(seen)]
    say("\n".join([console(rows, COLUMNS, indent=""), *(f"must not be: {line}" for line in broken)]))
    record = {"benchmark": "corruptions", "cases": len(results), "seed": flags.seed, "must_not_be": len(broken)}
    seconds = round(time.monotonic() - started, 1)
    publish(flags.output, record | {"seconds": seconds, "table": rows, **provenance()})
    sys.exit(bool(broken))


if __name__ == "__main__":
    cli.run_alone(main, Flags)
