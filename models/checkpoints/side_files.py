"""The config.json and tokenizer beside a folder's weights: whether they belong to them, by the folder's manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.errors import CheckpointError
from models.checkpoints.file_sums import remembered_sha256
from models.checkpoints.manifest import check_files, read_manifest
from models.checkpoints.tokenizer import TOKENIZER_FILES

WEIGHTS, CONFIG = "model.pth", "config.json"
SIDE_FILES = (CONFIG, *TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def own_side_files(folder: Path, weights: Sequence[Path], are_theirs: bool = False) -> tuple[str, ...]:
    """The side files that are there for `weights`, all in `folder`: not those that an earlier conversion generated.

    are_theirs: they belong to these weights, whatever was converted before. Raises CheckpointError where weights or
    side files are not what the manifest describes, or where it describes side files together with other weights.
    """
    manifest = read_manifest(folder)
    listed, converted = manifest["files"], manifest.get("converted_from", {}).get("files", {})
    generated = {name for name in SIDE_FILES if listed.get(name, {}).get("generated")}
    gone = {name for name in generated if not (folder / name).is_file()}
    indices = [name for name in listed if name.endswith(".index.json")]
    checked = generated - gone if are_theirs else set(SIDE_FILES) - gone
    check_files(folder, [*(path.name for path in weights), *indices, *sorted(checked)])

    others = {name for name in SIDE_FILES if name in listed} - generated
    known = [path.name in listed or remembered_sha256(path) in converted.values() for path in weights]
    # Only a GGUF has what it takes to generate them again; beside other weights they are left from a GGUF.
    foreign = (set() if all(known) else others) | (set() if weights[0].suffix == ".gguf" else generated - gone)
    if foreign and not are_theirs:
        raise CheckpointError(
            "the weights were put beside files of another checkpoint",
            where=str(folder),
            seen=f"{weights[0].name} with the {' and '.join(sorted(foreign))} of other weights",
            required="weights with their own config.json and tokenizer",
            fix="move the weights, with the files that belong to them, into a folder of their own; or add --force "
            "if the files that are here do",
        )
    return tuple(name for name in SIDE_FILES if (folder / name).is_file() and name not in generated)
