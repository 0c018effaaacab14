"""A folder of prefilled rows: the entries and logits of whole prompts, taken over bit by bit by later runs."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import CheckpointError
from common.say import say
from kv_cache import KVCache
from models.checkpoints.manifest import atomic_path


@dataclass(frozen=True)
class PrefixStore:
    """Prefilled rows in `folder`, at most `max_bytes` of them; the least recently used go first.

    key: everything besides the prompt that a row's bits depend on, such as weights, dtypes, kernels and versions.
    Several processes may use a folder at once: files appear whole, and a damaged one is as good as none.
    """

    folder: Path
    key: str
    max_bytes: int

    def load(self, cache: KVCache, row: int, prompt: Sequence[int]) -> tuple[Tensor, int | None] | None:
        """Fill an empty row of a full cache with the entries of `prompt`.

        Returns the logits behind its last token, and the first position whose numbers are not finite; None if the
        folder lacks the prompt.
        """
        path = self._path(prompt)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                bad_position = json.loads(file.metadata()["bad_position"])
                if file.metadata()["sha256"] != _digest(stored):
                    raise ValueError("its sum differs")
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            say(f"note: a prefilled row is damaged, and its prompt runs again: {path} ({error})")
            path.unlink(missing_ok=True)
            return None
        for name, part in _parts(cache, row, len(prompt)).items():
            part.copy_(stored[name])
        cache.positions[row, : len(prompt)] = torch.arange(len(prompt), device=cache.device)
        return stored["logits"].to(cache.device), bad_position

    def save(self, cache: KVCache, row: int, prompt: Sequence[int], logits: Tensor, bad_position: int | None) -> None:
        """Write the row of a full cache that holds `prompt`. A folder that cannot be written is noted."""
        parts = {name: part.cpu().contiguous() for name, part in _parts(cache, row, len(prompt)).items()}
        stored = parts | {"logits": logits.cpu().contiguous()}
        metadata = {"sha256": _digest(stored), "bad_position": json.dumps(bad_position)}
        try:
            with atomic_path(self._path(prompt)) as partial:
                save_file(stored, partial, metadata)
            self._evict()
        except (CheckpointError, OSError) as error:
            say(f"note: a prefilled row is not kept: {error}")

    def _path(self, prompt: Sequence[int]) -> Path:
        name = hashlib.sha256(f"{self.key} {[*prompt]}".encode()).hexdigest()
        return self.folder / f"{name[:32]}.safetensors"

    def _evict(self) -> None:
        """Delete the least recently used files beyond `max_bytes`."""
        left, found = self.max_bytes, [(path.stat(), path) for path in self.folder.glob("*.safetensors")]
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
