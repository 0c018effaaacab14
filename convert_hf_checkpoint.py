"""Convert a downloaded checkpoint (safetensors, pytorch_model.bin or GGUF) to model.pth."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from common import cli  # isort: split

import torch
from tqdm import tqdm
from tyro.conf import arg

from common.errors import CheckpointError, flag, refuse, refuse_checkpoint
from common.say import dtype_name
from models.checkpoints import manifest as files
from models.checkpoints.convert import HEAD, Source, check_tied_head, match_parts, read_stacked, source_parts
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.hf_config import config_from_hf, with_end_tokens
from models.checkpoints.loading import drop_layers, save_checkpoint
from models.checkpoints.source_weights import open_source
from models.checkpoints.tokenizer import load_tokenizer
from models.names import Dtype, parse_layers


@dataclass(frozen=True)
class Flags:
    checkpoint_dir: Path = DEFAULT_CHECKPOINT
    """folder of the download"""
    out_dir: Annotated[Path | None, arg(help_behavior_hint="(default: --checkpoint_dir)")] = None
    """folder for model.pth"""
    drop_layers: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """layers to leave out, such as 3,7,13-15"""
    dtype: Annotated[Dtype | None, arg(help_behavior_hint="(default: as stored)")] = None
    """dtype of the converted weights; a GGUF becomes float32 by default"""
    force: bool = False
    """convert again even if model.pth is up to date; also accept files that changed since the download"""


def convert(
    checkpoint_dir: Path,
    out_dir: Path,
    *,
    layers_to_drop: tuple[int, ...] = (),
    dtype: str | None = None,
    force: bool = False,
) -> Path:
    """Write model.pth, config.json, tokenizer, chat template and manifest.json to `out_dir`; return the model.pth.

    An earlier conversion is replaced; files that no conversion wrote are not touched.
    dtype: None for the dtype of the source (float32 for GGUF).
    force: convert even if the conversion is up to date, or if files differ from the folder's manifest.
    Raises CheckpointError or ConfigError before anything is written.
    """
    if (adapter := checkpoint_dir / "adapter_config.json").is_file():
        fix = "merge the adapter into the weights (peft: merge_and_unload), then delete it"
        refuse_checkpoint(adapter, "an adapter", "weights without an adapter", fix=fix)
    in_place, weights = out_dir.resolve() == checkpoint_dir.resolve(), out_dir / files.WEIGHTS
    if layers_to_drop and in_place:
        what = "a shallower model would overwrite its source"
        refuse("out_dir", out_dir, f"another folder than {flag('checkpoint_dir')}", what)
    is_conversion = in_place or not out_dir.is_dir() or "converted_from" in files.read_manifest(out_dir)
    if not is_conversion and (found := sorted(path.name for path in out_dir.iterdir())):
        seen, required = f"{out_dir} with {found[:4]}", "a new folder, or an earlier conversion's"
        refuse_checkpoint("out_dir", seen, required, fix="choose another folder")
    if not force:
        listed = files.read_manifest(checkpoint_dir)["files"]
        there = [name for name in listed if name != files.WEIGHTS and (checkpoint_dir / name).is_file()]
        files.check_files(checkpoint_dir, there)
    source = open_source(checkpoint_dir)
    config_from_hf(with_end_tokens(source.hf_config, checkpoint_dir), where=str(checkpoint_dir / files.CONFIG))
    is_tied = source.config.tie_embeddings
    matched = match_parts(checkpoint_dir, source.tensors, source_parts(source.config), [HEAD] if is_tied else [])
    if is_tied:
        check_tied_head(source.tensors)
    matched, config = drop_layers(matched, source.config, layers_to_drop)
    if source.tokenizer_json is None:
        load_tokenizer(checkpoint_dir, source.side_files)
    hf_config = source.hf_config | {"num_hidden_layers": config.n_layer}
    hf_config.pop("quantization_config", None)  # weights are plain from here on
    if isinstance(kinds := hf_config.get("layer_types"), list):
        hf_config["layer_types"] = [kind for layer, kind in enumerate(kinds) if layer not in layers_to_drop]
    if source.config.unrotated_layers:
        hf_config["no_rope_layers"] = [int(layer not in config.unrotated_layers) for layer in range(config.n_layer)]
    recipe: dict[str, Any] = {
        "files": files.describe(checkpoint_dir, [*(path.name for path in source.files), *source.side_files]),
        "config": json.loads(json.dumps(asdict(config))),
        "dtype": dtype,
        "published": sorted({part.published for parts in matched.values() for part in parts if len(part.shape) > 1}),
        "dropped_layers": list(layers_to_drop),
    }
    if not force and _is_converted(out_dir, recipe):
        print(f"{weights} is up to date (--force converts again)")
        return weights
    target = getattr(torch, dtype) if dtype else None
    with tqdm(matched.items(), desc="reading", unit="tensor") as bar:  # closed, too, where reading fails
        state_dict = {name: read_stacked(name, stacked, target) for name, stacked in bar}
    save_checkpoint(weights, config, state_dict)
    generated = _write_side_files(checkpoint_dir, out_dir, source, json.dumps(hf_config, indent=2) + "\n")
    written = [name for name in (files.WEIGHTS, *files.SIDE_FILES) if (out_dir / name).is_file()]
    listed = files.read_manifest(out_dir)["files"] if in_place else {}
    entries = {name: entry for name, entry in recipe["files"].items() if name in listed}
    entries |= files.describe(out_dir, written)
    for name in generated:
        entries[name]["generated"] = True
    stored = sorted({dtype_name(tensor.dtype) for tensor in state_dict.values() if tensor.ndim > 1})
    files.update_manifest(out_dir, entries, converted_from=recipe, stored=stored)
    if (n_ids := len(load_tokenizer(out_dir).pieces())) > config.vocab_size:
        lacking = f"{config.vocab_size} to {n_ids - 1}"
        print(f"note: the tokenizer has ids that the model lacks, {lacking}: prompts with them are refused")
    formats = f"published in {' and '.join(recipe['published'])}, stored in {' and '.join(stored)}"
    print(f"wrote {weights}: {config.n_parameters / 1e6:.1f}M parameters, {config.n_layer} layers, {formats}")
    return weights


def _is_converted(out_dir: Path, recipe: dict[str, Any]) -> bool:
    """True if `out_dir` has the complete result of this conversion."""
    try:
        manifest = files.read_manifest(out_dir)
        files.check_files(out_dir, manifest["files"])
    except CheckpointError:
        return False
    return manifest.get("converted_from") == recipe


def _write_side_files(checkpoint_dir: Path, out_dir: Path, source: Source, config: str) -> list[str]:
    """Replace the side files in `out_dir`; return the names of files that were made from a GGUF's metadata."""
    texts = {files.CONFIG: config, "tokenizer.json": source.tokenizer_json, files.CHAT_TEMPLATE: source.chat_template}
    made = {name: text for name, text in texts.items() if text is not None and name not in source.side_files}
    for name in set(files.SIDE_FILES).intersection(files.read_manifest(out_dir)["files"]).difference(source.side_files):
        (out_dir / name).unlink(missing_ok=True)
    written = made
    if out_dir.resolve() != checkpoint_dir.resolve():
        for name in source.side_files:
            with files.atomic_path(out_dir / name) as partial:
                shutil.copyfile(checkpoint_dir / name, partial)
        written = made | {files.CONFIG: config}  # with the layers that are left
    for name, text in written.items():
        files.write_text(out_dir / name, text)
    return [*made]


def main(flags: Flags) -> None:
    layers = tuple(parse_layers(flags.drop_layers)) if flags.drop_layers else ()
    out_dir = flags.out_dir or flags.checkpoint_dir
    convert(flags.checkpoint_dir, out_dir, layers_to_drop=layers, dtype=flags.dtype, force=flags.force)


if __name__ == "__main__":
    cli.run(main, Flags)
