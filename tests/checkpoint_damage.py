"""Ways to damage a file of a checkpoint: bits, ranges of bytes, lengths, weights, and values of its JSON."""

import json
import math
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
from checkpoint_folders import HF_CONFIG, VOCABULARY

from models.checkpoints.manifest import MANIFEST

Spans = list[tuple[int, int]]
NOT_FINITE = (math.nan, math.inf, -math.inf)
SIZES = [key for key, value in HF_CONFIG.items() if type(value) is int]
NO_SIZE = (0, -1, 1.5, "4", True, [3], {}, 10**30)
NO_NUMBER = (0, -1e-5, "big", True, [1.0], float("nan"), float("inf"))
DEEP: Any = json.loads("[" * 400 + "]" * 400)
HUGE = "<5000 digits>"  # which Python's json neither writes nor reads


def edits(place: str, *values: object) -> list[tuple[str, object]]:
    return [(place, value) for value in values]


# Where in the JSON, and what is put there.
EDITS = {
    "config.json": [
        *(edit for key in SIZES for edit in edits(key, *NO_SIZE)),
        *(edit for key in ("rms_norm_eps", "rope_theta") for edit in edits(key, *NO_NUMBER)),
        *edits("eos_token_id", 1.5, -1, True, "1", [[1]], [1, 1.5], len(VOCABULARY), 10**30, {}, DEEP, HUGE),
        *edits("architectures", None, 5, [], [5], ["GemmaForCausalLM"], DEEP),
        *edits("rope_scaling", 5, "linear", False, [], DEEP, {"type": "linear"}, {"type": "yarn"}),
        *edits("tie_word_embeddings", "no", 0, 1, []),
        *edits("hidden_act", "gelu", None, 5),
    ],
    "tokenizer.json": [
        *edits("model", None, 5, [], {}, {"type": "none"}, DEEP, HUGE),
        *edits("model/vocab", None, 5, {"a": -1}, {"a": "b"}, {"a": 1e30}, {"a": 10**30}, DEEP),
        *edits("model/merges", 5, ["a"], [["a"]], [["no", "pe"]], DEEP),
        *edits("added_tokens", 5, "a", [5], [{"id": -1}]),
        *edits("decoder", 5, {"type": "none"}, DEEP),
    ],
    "model.safetensors.index.json": [
        *edits("weight_map", None, 5, [], "model", DEEP, HUGE),
        *edits("weight_map/model.norm.weight", None, 5, "", "..", "../x", "none.safetensors", "\0", DEEP),
        *edits("weight_map/extra", MANIFEST, "model-00001-of-00002.safetensors"),
    ],
    MANIFEST: [
        *edits("files", None, 5, [], {}, DEEP, HUGE),
        *edits("files/config.json", None, 5, [], {}, "x", {"size": 1}, DEEP),
        *edits("files/config.json/size", None, -1, 1.5, "x", 10**30),
        *edits("files/config.json/sha256", None, 5, "", "0" * 64, []),
        *edits("converted_from", 5, [], DEEP),
    ],
}


def spans_of(path: Path) -> Spans:
    """Where a file holds tensor data."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        return [(8 + struct.unpack("<Q", content[:8])[0], len(content))]
    if path.suffix == ".gguf":
        return [(t.data_offset, t.data_offset + t.n_bytes) for t in gguf.GGUFReader(path).tensors]
    if path.suffix in (".bin", ".pth"):
        with zipfile.ZipFile(path) as archive:
            records = [record for record in archive.infolist() if "/data/" in record.filename]
        spans = []
        for record in records:
            lengths = struct.unpack_from("<HH", content, record.header_offset + 26)
            start = record.header_offset + 30 + sum(lengths)
            spans.append((start, start + record.file_size))
        return spans
    return []


def damage(path: Path, kind: str, other: Path, number: int, rng: random.Random) -> None:
    """Do to a file what `kind` says; `other` is that of another model, and edits of JSON are told by their number."""
    if kind == "drop":
        path.unlink()
    elif kind == "swap":
        shutil.copyfile(other, path)
    elif kind == "edit":
        edit(path, *EDITS[path.name][number])
    elif kind == "NaN or infinity" and path.suffix in (".bin", ".pth"):
        content = torch.load(path, weights_only=True)
        tensor = rng.choice(list(content.get("state_dict", content).values()))
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(NOT_FINITE)
        torch.save(content, path)
    else:
        changed = before = path.read_bytes()
        data = spans_of(path)
        while changed == before:
            changed = _change(before, kind, data, rng)
        path.write_bytes(changed)


def _change(before: bytes, kind: str, data: Spans, rng: random.Random) -> bytes:
    """The content of a file with other bytes: in `data` if the kind says so, or not there."""
    content, length = bytearray(before), rng.randint(1, 40)
    inside = {i for span in data for i in range(*span)}
    start = rng.randrange(len(content) + (kind == "insert"))
    if kind.endswith("data"):
        start = rng.choice(sorted(inside))
    elif kind.endswith("elsewhere"):
        outside = set(range(len(content))) - inside
        start = rng.choice(sorted(outside))
        length = next((n for n in range(1, length) if start + n not in outside), length)
    if kind.startswith("flip"):
        content[start] ^= 1 << rng.randrange(8)
    elif kind.startswith("zero"):
        last = next(end for first, end in data if first <= start < end) if kind.endswith("data") else len(content)
        length = min(length, last - start)
        content[start : start + length] = bytes(length)
    elif kind == "NaN or infinity":
        first, end = rng.choice(data)
        at = first + 4 * rng.randrange((end - first) // 4)
        content[at : at + 4] = struct.pack("<f", rng.choice(NOT_FINITE))
    elif kind == "truncate":
        del content[start:]
    elif kind == "delete":
        del content[start : start + length]
    else:
        start = len(content) if kind == "append" else start
        content[start:start] = rng.randbytes(length)
    return bytes(content)


def edit(path: Path, place: str, value: Any) -> None:
    """Put a value where the path of keys says."""
    whole = json.loads(path.read_text())
    *parents, last = place.split("/")
    inner = whole
    for key in parents:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(whole, indent=2).replace(json.dumps(HUGE), "9" * 5000))
