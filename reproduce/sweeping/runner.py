"""Runs the cells that have no row yet, one at a time, and appends a row of each as it ends.

The rows are lines of JSON, keyed by a hash of what was run. Wherever the runner is killed, the next one goes on
behind the last row: a row is written at once and forced to disk, a torn one is none, and a lock, which a killed
runner's last child keeps until it is gone, too, lets one runner at a time write.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from common.errors import ConfigError, UserError, flag
from common.jsonl import append_record, read_lines, require_appendable
from common.provenance import git_commit
from common.say import say
from reproduce.sweeping.cells import Cell, labels
from reproduce.sweeping.child import last_object, run_child

OK, FAILED = "ok", "failed"


def read_rows(output: str | Path) -> dict[str, dict]:
    """The last row of each key; a torn line is none. Errors: ConfigError naming a line that is no row."""
    rows = {}
    for number, row in read_lines(output):
        if not isinstance(row, dict) or row.get("status") not in (OK, FAILED) or not isinstance(row.get("key"), str):
            where, required = f"{output}, line {number}", f"a JSON object with a key and a status, {OK} or {FAILED}"
            fix = "delete this line if it was damaged, or choose another --output if the file is of another kind"
            raise ConfigError("a line is not a row of a sweep", where, str(row)[:80], required, fix)
        rows[row["key"]] = row
    return rows


def run_cells(
    cells: Sequence[Cell], output: str | Path, *, retry_failed: bool = False, timeout_s: float | None = None
) -> list[dict]:
    """Run every cell that has no row in `output`, append its row, and return the cells' rows, in their order.

    A cell that fails, or takes longer than `timeout_s`, is a row with its error, and is not run again unless
    `retry_failed`. What a cell says goes to `<output>.logs/<key>.log`, what it prints to `.out`. Errors:
    ConfigError."""
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        fix = "leave it out to let cells take their time"
        raise ConfigError("no cell can end in this time", flag("timeout"), timeout_s, "> 0 seconds", fix)
    require_appendable(str(output))
    path, final = Path(output).resolve(), (OK,) if retry_failed else (OK, FAILED)
    with _only_runner(path) as lock:
        rows = read_rows(path)
        named = zip(cells, labels(cells), strict=True)
        waiting = [(cell, label) for cell, label in named if rows.get(cell.key, {}).get("status") not in final]
        n_done, seconds = len(cells) - len(waiting), list[float]()
        say(f"{n_done} of {len(cells)} cells have a row in {path}, {len(waiting)} to run")
        for cell, label in waiting:
            say(f"[{n_done + 1} of {len(cells)}]  {label}")
            try:
                row = _run(cell, path, timeout_s, lock)
            except KeyboardInterrupt:
                say(f"\ninterrupted: {n_done} of {len(cells)} cells have a row in {path}; {label} was cut off")
                say("run the same command again to go on")
                raise
            try:
                append_record(str(path), row)
            except UserError:  # the same command runs this cell again, but what took hours may be wanted
                print(json.dumps(row), flush=True)
                raise
            rows[cell.key], n_done, seconds = row, n_done + 1, [*seconds, row["seconds"]]
            left = f"about {mean(seconds) * (len(cells) - n_done) / 60:.0f} min left"
            said = f"{row['status']} in {row['seconds']:.1f} s, {left}\n{row['error'] or ''}".rstrip()
            say("    " + said.replace("\n", "\n    "))
    return [rows[cell.key] for cell in cells]


def _run(cell: Cell, output: Path, timeout_s: float | None, lock: int) -> dict[str, Any]:
    origin = {"git_commit": git_commit(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    log, printed = (make_logs(output) / f"{cell.key}.{kind}" for kind in ("log", "out"))
    outcome = run_child(cell.argv(), log, timeout_s, printed=printed, keep_open=[lock])
    record, error = last_object(printed.read_bytes()), outcome.error
    if error is None and record is None:
        error = f"exit code 0, but no line of its stdout is a JSON object; see {printed.parent.name}/{printed.name}"
    row = {"key": cell.key, "script": cell.script, "flags": cell.given, "status": FAILED if error else OK}
    return row | {"error": error, "seconds": outcome.seconds, "record": record} | origin


def make_logs(output: str | Path) -> Path:
    """The folder of what the cells said, made and found to be writable. Errors: ConfigError."""
    logs = Path(f"{output}.logs")
    try:
        logs.mkdir(exist_ok=True)
        (logs / "lock").touch()
    except OSError as error:
        what, fix = "there is no place for the logs", "move away what is there, or choose another --output"
        raise ConfigError(what, logs, error, "a folder that can be written", fix) from None
    return logs


@contextmanager
def _only_runner(output: Path) -> Iterator[int]:
    """Wait for the lock of `output` and hold it; yields its file descriptor, which keeps it as long as any process has
    it open: also a killed runner's last child."""
    with (make_logs(output) / "lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another runner of {output}, process {file.read().strip() or 'unknown'}, or its child")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()
