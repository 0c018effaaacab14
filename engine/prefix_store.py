"""A folder of prefilled rows: the entries and logits of whole prompts, taken over bit by bit by later runs."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import CheckpointError
from common.say import say
from kv_cache import KVCache
from models.checkpoints.manifest import atomic_path


@dataclass
class PrefixStore:
    """Prefilled rows in `folder`, at most `max_bytes` of them; the least recently used go first.

    key: everything besides the prompt that a row's bits depend on, such as weights, dtypes, kernels and versions.
    n_taken_over: rows of earlier runs that this run took over. saving_seconds: spent on writing rows.
    Several processes may use a folder at once: files appear whole, and a damaged file counts as a missing one.
    """

    folder: Path
    key: str
    max_bytes: int
    n_taken_over: int = 0
    saving_seconds: float = 0.0
    _saved: set[Path] = field(default_factory=set)

    def load(self, cache: KVCache, row: int, prompt: Sequence[int]) -> tuple[Tensor, int | None] | None:
        """Fill an empty row of a full cache with the entries of `prompt`.

        Returns the logits after its last token, and the first position whose numbers are not finite; None if the
        folder lacks the prompt.
        """
        path = self._path(prompt)
        if not path.is_file():  # opening a FIFO would wait for a writer
            return None
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                bad_position = json.loads(file.metadata()["bad_position"])
                if file.metadata()["sha256"] != _digest(stored):
                    raise ValueError("its sum differs")
        except OSError:
            return None
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            say(f"note: a prefilled row is damaged, and its prompt runs again: {path} ({error})")
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):  # a folder of another user
            os.utime(path)
        for name, part in _parts(cache, row, len(prompt)).items():
            part.copy_(stored[name])
        cache.positions[row, : len(prompt)] = torch.arange(len(prompt), device=cache.device)
        self.n_taken_over += path not in self._saved
        return stored["logits"].to(cache.device), bad_position

    def save(self, cache: KVCache, row: int, prompt: Sequence[int], logits: Tensor, bad_position: int | None) -> None:
        """Write the row of a full cache that holds `prompt`. A folder that cannot be written is noted."""
        began, path = time.perf_counter(), self._path(prompt)
        parts = {name: part.cpu().contiguous() for name, part in _parts(cache, row, len(prompt)).items()}
        stored = parts | {"logits": logits.cpu().contiguous()}
        metadata = {"sha256": _digest(stored), "bad_position": json.dumps(bad_position)}
        try:
            with atomic_path(path) as partial:
                save_file(stored, partial, metadata)
            self._saved.add(path)
            self._evict()
        except (CheckpointError, OSError) as error:
            say(f"note: a prefilled row is not kept: {error}")
        self.saving_seconds += time.perf_counter() - began

    def _path(self, prompt: Sequence[int]) -> Path:
        name = hashlib.sha256(f"{self.key} {[*prompt]}".encode()).hexdigest()
        return self.folder / f"prefix-{name[:32]}.safetensors"

    def _evict(self) -> None:
        """Delete the least recently used files beyond `max_bytes`."""
        left, found = self.max_bytes, []
        for path in self.folder.glob("prefix-*.safetensors"):
            with suppress(FileNotFoundError):  # another process was faster
                found += [(path.stat(), path)] if path.is_file() else []
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime, reverse=True):
            left -= stat.st_size
            if left < 0:
                path.unlink(missing_ok=True)


def _parts(cache: KVCache, row: int, n: int) -> dict[str, Tensor]:
    """Return views of a row's first `n` entries, and of their scales if they have any."""
    stored = {"entries": cache.entries, "scales": cache.scales}
    return {name: x[:, :, row, :, :n] for name, x in stored.items() if x is not None}


def _digest(stored: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(stored):
        digest.update(stored[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
