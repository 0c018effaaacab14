"""Configurations that were changed on purpose: what they are converted to here, beside what transformers loads.

    python tests/config_cases.py [--only WORD] [--output results.jsonl]

Each case sets, adds or drops keys in the config.json of a tiny random checkpoint. Prints a table of the outcomes and,
last, one JSON object. Exit code 1 if a case was accepted with other logits than transformers computes.
"""

import contextlib
import io
import itertools
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, llama3_rope, random_model, rope, save_folder
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from tyro.conf import arg

from common import cli
from common.errors import ConfigError, UserError, flag
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.tables import Column, console
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models import load_model

TOLERANCE = 1e-5  # of logits of order 1, in float32
LENGTHS, PREFILLED, BLOCK = (27, 48), 15, 3
WRONG = "accepted, other logits"
DROP = ...

BASES = {
    "llama": LlamaConfig(**SHAPE, **rope(10000.0)),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, biased": LlamaConfig(**SHAPE, attention_bias=True),
    "llama, biased mlp": LlamaConfig(**SHAPE, mlp_bias=True),
    "llama, llama3": LlamaConfig(**SHAPE, **llama3_rope(8.0)),
    "mistral": MistralConfig(**SHAPE, **rope(10000.0), sliding_window=11),
    "qwen2": Qwen2Config(**SHAPE, **rope(10000.0)),
}
PLAIN = ("llama", "mistral", "qwen2")
NAMES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_CORNERS}
FULL, SLIDING = "full_attention", "sliding_attention"
# Keys that transformers takes into the configuration, and that change no logits.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.5, None),
    "attn_implementation": ("flash_attention_2",),
    "auto_map": ({"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"},),
    "bos_token_id": (5, None),
    "chunk_size_feed_forward": (2,),
    "dtype": ("float16",),
    "id2label": ({"0": "a"},),
    "initializer_range": (0.5,),
    "max_window_layers": (1, 0),
    "output_attentions": (True,),
    "output_hidden_states": (True,),
    "pad_token_id": (3, -1, 10**6),
    "pretraining_tp": (2, None),
    "return_dict": (False,),
    "temperature": (0.1,),
    "torch_dtype": ("bfloat16",),
    "transformers_version": ("4.0.0",),
    "use_cache": (False,),
}
VALUES: dict[str, tuple[Any, ...]] = WITHOUT_EFFECT | {
    "architectures": (DROP, None, [], "LlamaForCausalLM", *([name] for name in NAMES), ["LlamaModel"], [list(NAMES)]),
    "model_type": (DROP, None, "llama", "mistral", "qwen2", "qwen3", "granite", "ministral", 5),
    "vocab_size": (DROP, None, 64, float(N_TOKENS), str(N_TOKENS)),
    "hidden_size": (DROP, 32, 66, 64.0, "64", True),
    "intermediate_size": (DROP, None, 95, 96.0),
    "num_hidden_layers": (DROP, 1, 3, 2.0),
    "num_attention_heads": (DROP, 2, 8, 4.0, 0),
    "num_key_value_heads": (DROP, None, 1, 4, 3, 2.0),
    "head_dim": (DROP, None, 8, 16, 32, 16.0, "16", 0),
    "max_position_embeddings": (DROP, None, 16, 4096, 128.0, "128", 0),
    "rms_norm_eps": (DROP, None, 0.1, 1e-5, 1, 0, "1e-5", True, -1e-5, math.nan),
    "hidden_act": (DROP, None, "silu", "gelu", "relu", "swish"),
    "tie_word_embeddings": (DROP, None, True, False, 0, 1, "true", []),
    "eos_token_id": (DROP, None, 7, [3, 4], [], -1, "2", 2.0),
    "attention_bias": (None, True, False, 0, "true"),
    "mlp_bias": (None, True, False, 1),
    "sliding_window": (DROP, None, 5, 11, 4096, 0, "8", 8.0),
    "use_sliding_window": (None, True, False, 1),
    "layer_types": (None, [FULL] * 2, [SLIDING] * 2, [FULL, SLIDING], [FULL], [], "full_attention"),
    "is_causal": (True, False, None, 0),
    "is_encoder_decoder": (True, False),
    "quantization_config": (None, {}, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "attention_chunk_size": (None, 7),
    "kv_sharing_modes": (None, ["reuse", "reuse"]),
    "per_layer_config": (
        None,
        {"0": {"num_key_value_heads": 1}},
        {"1": {"sliding_window": 5}},
        {"1": {"skip": ["mlp"]}},
    ),
    "attribute_map": ({"rms_norm_eps": "initializer_range"},),
    "configuration_files": (["config.4.0.0.json"],),
    "transformers_weights": (None, "other.safetensors"),
    **dict.fromkeys(("text_config", "text_encoder", "decoder", "generator"), (None, {"rms_norm_eps": 0.1})),
    "rope_theta": (None, 500.0, 3.6e9, "10000", True, 0, -5.0, math.inf),
    "partial_rotary_factor": (None, 1, 1.0, 0.5, 0.25, "0.5"),
    "original_max_position_embeddings": (None, 16, 64, "64"),
    "rope_scaling": (
        None,
        {},
        LINEAR,
        LINEAR | {"rope_theta": 500.0},
        {"type": "linear", "factor": 2},
        YARN,
        [],
        "linear",
    ),
    "rope_parameters": (
        DROP,
        None,
        {},
        [],
        "linear",
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_theta": 500},
        {"rope_theta": None},
        {"rope_theta": "500"},
        {"rope_type": None, "rope_theta": 500.0},
        {"type": None},
        {"rope_type": "default", "type": "linear", "factor": 4.0},
        {"rope_type": "linear", "type": "yarn", "factor": 4.0},
        {"rope_type": "linear"},
        *(LINEAR | {"factor": factor} for factor in (2, 0.5, None, "4", True, 0, -2.0)),
        *(LINEAR | {"rope_type": kind} for kind in ("dynamic", "yarn", "longrope", "mrope", "su", "llama3", 5)),
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        *({"rope_type": "default", "partial_rotary_factor": factor} for factor in (1.0, 0.5, None)),
        *(LINEAR | {"partial_rotary_factor": factor} for factor in (1.0, 0.5)),
        LINEAR | {"attention_factor": 2.0, "original_max_position_embeddings": 16},
        LLAMA3,
        *({k: v for k, v in LLAMA3.items() if k != key} for key in LLAMA3),
        LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        LLAMA3 | {"low_freq_factor": 4.0},
        LLAMA3 | {"high_freq_factor": "4"},
        LLAMA3 | {"original_max_position_embeddings": None},
        LLAMA3 | {"original_max_position_embeddings": 16, "mscale": 2.0},
        {FULL: LINEAR},
        {FULL: {"rope_theta": 500.0, "rope_type": "default"}, SLIDING: LINEAR},
    ),
}
UNKNOWN: tuple[dict[str, Any], ...] = (
    {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.01, "residual_multiplier": 0.2},
    {"final_logit_softcapping": 1.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 7},
    {"qkv_bias": True, "bias": True, "use_bias": True, "no_bias": False},
    {"layer_norm_eps": 0.5, "norm_eps": 0.5, "rope_base": 5.0, "n_layer": 1, "n_embd": 8},
    {"num_experts": 8, "num_local_experts": 8, "use_qk_norm": True, "rope_interleaved": True},
    {"no_rope_layers": [0, 1], "no_rope_layer_interval": 2, "use_bidirectional_attention": True},
)
# As files of before transformers 5 have them, and both at once.
OLD = {"rope_parameters": DROP, "rope_theta": 500.0}
COMBINATIONS: tuple[dict[str, Any], ...] = (
    *UNKNOWN,
    OLD,
    *(OLD | {"rope_scaling": scaling} for scaling in (None, {}, LINEAR, LLAMA3, YARN, [], "linear", False)),
    OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    OLD | {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    OLD | {"rope_scaling": LINEAR, "original_max_position_embeddings": 16},
    OLD | {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 900.0}},
    OLD | {"partial_rotary_factor": 0.5},
    OLD | {"rope_theta": None},
    {"rope_parameters": YARN, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR, "rope_scaling": YARN},
    {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_scaling": {}},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_scaling": LINEAR, "rope_theta": 900.0},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    *({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": n} for n in (0, 1, 2, 28)),
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    {"use_sliding_window": False, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    {"sliding_window": None, "layer_types": [FULL, FULL]},
    {"model_type": DROP, "architectures": DROP},
    *({"model_type": DROP, "architectures": [name]} for name in NAMES),
    {"head_dim": DROP, "num_key_value_heads": DROP},
    *({"num_attention_heads": n, "num_key_value_heads": n // 2, "head_dim": 64 // n} for n in (2, 4, 8)),
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": DROP},
    {"num_attention_heads": 8, "num_key_value_heads": DROP, "head_dim": 8},
    {"tie_word_embeddings": DROP, "rms_norm_eps": DROP, "hidden_act": DROP, "max_position_embeddings": DROP},
)
OF_ONE_BASE: dict[str, tuple[dict[str, Any], ...]] = {
    "llama, tied": ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": DROP}, {"tie_word_embeddings": None}),
    "llama, biased": ({}, {"attention_bias": False}, {"attention_bias": DROP}, {"mlp_bias": True}),
    "llama, biased mlp": ({}, {"mlp_bias": False}, {"mlp_bias": DROP}),
    "llama, llama3": (
        {},
        *({"original_max_position_embeddings": n} for n in (16, 64, None)),
        *({"max_position_embeddings": n} for n in (32, 64)),
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": DROP},
    ),
}


class Case(NamedTuple):
    base: str
    changes: dict[str, Any]

    @property
    def name(self) -> str:
        said = {key: "dropped" if value is DROP else value for key, value in self.changes.items()}
        return f"{self.base}: {json.dumps(said)}"


def all_cases() -> Iterator[Case]:
    """Every change to each of the plain checkpoints; then those of one checkpoint alone."""
    changes = [{key: value} for key, values in VALUES.items() for value in values]
    for change, base in itertools.product([*changes, *COMBINATIONS], PLAIN):
        yield Case(base, change)
    for base, several in OF_ONE_BASE.items():
        yield from (Case(base, change) for change in several)


def applied(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**values, **changes}.items() if value is not DROP}


class Checkpoints:
    """The tiny checkpoints on disk, and the logits of transformers with each as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
        with quiet():
            for name, config in BASES.items():
                save_folder(random_model(config), folder / name)
        self.logits = {name: by_transformers(folder / name, self.rows) for name in BASES}

    def outcome(self, case: Case) -> str:
        """Convert and load a case, and compare it with what transformers makes of the same folder."""
        base = self.folder / case.base
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            changed = Path(scratch) / "changed"
            changed.mkdir()
            for path in base.iterdir():
                (changed / path.name).symlink_to(path)
            values = applied(json.loads((base / "config.json").read_text()), case.changes)
            (changed / "config.json").unlink()
            (changed / "config.json").write_text(json.dumps(values))
            try:
                theirs = by_transformers(changed, self.rows)
            except Exception:  # of many kinds, whatever line first stumbles
                theirs = None
            try:
                ours = by_us(changed, Path(scratch) / "converted", self.rows)
            except UserError:
                return "both refuse" if theirs is None else "refused here"
        if theirs is None:
            return "no effect here, refused by transformers" if are_equal(ours, self.logits[case.base]) else WRONG
        return "equal logits" if are_equal(ours, theirs) else WRONG


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in zip(ours, theirs, strict=True))


def by_us(source: Path, converted: Path, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits `[T, V]` of each row, in one forward pass. Raises UserError."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        model = load_model(convert(source, converted).parent, prepack=False)
    positions = [torch.arange(len(row))[None] for row in rows]
    caches = [FullKVCache(model.config, 1, len(row)) for row in rows]
    return [model(row[None], at, cache)[0] for row, at, cache in zip(rows, positions, caches, strict=True)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No remarks and progress bars of transformers: most cases cause some."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


@torch.no_grad()
def by_transformers(folder: Path, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits `[T, V]` of each row, in one forward pass. Raises ValueError if weights are missing or left
    over, or if decoding gives other logits; and whatever transformers raises where it does not load a file."""
    values = json.loads((folder / "config.json").read_text())
    kind = AutoModelForCausalLM if "model_type" in values else getattr(transformers, values["architectures"][0])
    options = {"attn_implementation": "eager", "dtype": torch.float32, "local_files_only": True}
    with quiet():
        model, said = kind.from_pretrained(folder, output_loading_info=True, **options)
    if wrong := [name for name, found in said.items() if found]:
        raise ValueError(f"the weights do not fit: {wrong}")
    return [_logits(model.eval(), row[None]) for row in rows]


def _logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    whole = model(row, return_dict=True).logits[0]
    step = model(row[:, :PREFILLED], use_cache=True, return_dict=True)
    parts = [step.logits[0]]
    for block in row[:, PREFILLED:].split(BLOCK, 1):
        step = model(block, past_key_values=step.past_key_values, use_cache=True, return_dict=True)
        parts.append(step.logits[0])
    if not torch.allclose(torch.cat(parts), whole, rtol=0, atol=TOLERANCE):
        raise ValueError("decoding gives other logits than a forward pass")
    return whole


@dataclass(frozen=True)
class Flags:
    only: Annotated[str | None, arg(help_behavior_hint="(default: all)")] = None
    """only cases in whose name this word is"""
    output: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """append the JSON record to this file"""


def main(flags: Flags) -> None:
    require_appendable(flags.output)
    cases = [case for case in all_cases() if not flags.only or flags.only in case.name]
    if not cases:
        required, fix = "a word of a case's name", f"leave out {flag('only')}"
        raise ConfigError("no case has such a name", flag("only"), flags.only, required, fix)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        outcomes = [(case, checkpoints.outcome(case)) for case in cases]
    counts = Counter((case.base, outcome) for case, outcome in outcomes)
    rows = [{"base": base, "outcome": outcome, "cases": n} for (base, outcome), n in sorted(counts.items())]
    columns = Column("base", "checkpoint", align="<"), Column("outcome", "outcome", align="<"), Column("cases", "cases")
    wrong = [case.name for case, outcome in outcomes if outcome == WRONG]
    record = {"benchmark": "config_cases", "transformers_version": transformers.__version__, "tolerance": TOLERANCE}
    record |= {"cases": len(cases), "wrong": wrong, "outcomes": rows} | provenance()
    publish(flags.output, record, *(f"{WRONG}: {name}" for name in wrong), console(rows, columns, indent=""))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    cli.run_alone(main, Flags)
