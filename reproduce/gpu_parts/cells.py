"""Cells of measurement: each run in its own try, so that one that breaks is a record and the rest goes on."""

import gc
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from common.errors import OutOfMemoryError

DONE, FAILED, ERROR, SKIPPED = "done", "failed", "error", "skipped"
# After such an error nothing runs on the device any more, not from this process.
BROKEN_DEVICE = ("CUDA error", "illegal memory access", "device-side assert", "launch failure")
IN_4_BITS: Literal["4 bits"] = "4 bits"
Record = dict[str, Any]
Value = TypeVar("Value")
SIZES = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text())


@dataclass(frozen=True)
class Options:
    """What every part needs to know. quick: sizes for a CPU and a test, not for a result."""

    device: str
    quick: bool

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def sizes(self) -> dict[str, Any]:
        return SIZES["quick" if self.quick else "full"]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_cuda else torch.float32


class Cell(NamedTuple):
    """One measurement: `run` returns its fields; `status` among them says if a check failed."""

    part: str
    benchmark: str
    name: str
    run: Callable[[], Record]


class Skip(Exception):
    """Why a cell does not make sense here."""


def verdict(is_good: bool) -> Record:
    return {"status": DONE if is_good else FAILED}


def shared(build: Callable[..., Value]) -> Callable[..., Value]:
    """For what successive cells share: the last value is kept for the same arguments, and let go before another is
    built. A build that failed fails again for all of these cells, without being tried again."""
    kept: dict[tuple, Value | Exception] = {}

    def get(*key: Any) -> Value:
        if key not in kept:
            kept.clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                kept[key] = build(*key)
            except Exception as error:
                # Without its traceback, whose frames hold the tensors that were built so far.
                kept[key] = error.with_traceback(None)
        value = kept[key]
        if isinstance(value, Exception):
            raise value
        return value

    return get


def run_cells(cells: Iterable[Cell], deadline: float, keep: Callable[[Cell, Record], object]) -> bool:
    """Run cells in order and keep what comes of each as it ends, those behind `deadline` (seconds since the epoch) as
    skipped; stop and return False if the device broke."""
    for cell in cells:
        began, is_broken = time.time(), False
        try:
            if began >= deadline:
                raise Skip("the time limit was reached before it began")
            result = {"status": DONE} | cell.run()
        except (Skip, OutOfMemoryError) as reason:
            result = {"status": SKIPPED, "reason": str(reason)}
        except Exception as error:
            result, is_broken = describe(error), breaks_device(error)
        keep(cell, result | {"seconds": round(time.time() - began, 3)})
        if is_broken:
            return False
    return True


def breaks_device(error: Exception) -> bool:
    return any(text in str(error) for text in BROKEN_DEVICE)


def describe(error: Exception) -> Record:
    """An error as a record's fields, with the innermost lines that it came through."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return {"status": ERROR, "error": f"{type(error).__name__}: {str(error)[:2000]}", "where": where}
