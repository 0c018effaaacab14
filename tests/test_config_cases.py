"""A changed config.json is refused, or has the logits of transformers. The changes take turns among tiny random
checkpoints of Llama, Mistral and Qwen2."""

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, random_model, rope, save_folder
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import UserError
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models import load_model

TOLERANCE = 1e-5  # of logits of order 1, in float32
LENGTHS, PREFILLED, BLOCK = (27, 48), 15, 11
DROP = ...
BASES = {
    "llama": LlamaConfig(**SHAPE, **rope(10000.0)),
    "mistral": MistralConfig(**SHAPE, **rope(10000.0), sliding_window=11),
    "qwen2": Qwen2Config(**SHAPE, **rope(10000.0)),
}
LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_CORNERS}
FULL, SLIDING = "full_attention", "sliding_attention"
VALUES: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.5,),
    "architectures": (DROP, None, ["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["LlamaModel"]),
    "model_type": (DROP, None, "llama", "mistral", "qwen3"),
    "vocab_size": (DROP, 64, float(N_TOKENS)),
    "hidden_size": (DROP, 32, 66, "64", True),
    "intermediate_size": (DROP, 95),
    "num_hidden_layers": (DROP, 1, 3),
    "num_attention_heads": (DROP, 2, 8, 0),
    "num_key_value_heads": (DROP, None, 1, 3),
    "head_dim": (DROP, None, 8, 16, "16", 0),
    "max_position_embeddings": (DROP, None, 16, "128"),
    "rms_norm_eps": (DROP, None, 0.1, 1, 0, -1e-5, math.nan),
    "hidden_act": (DROP, None, "silu", "gelu", "swish"),
    "tie_word_embeddings": (DROP, None, True, 1, "true"),
    "eos_token_id": (None, 7, [3, 4], -1, "2"),
    "attention_bias": (None, True, False, 0),
    "mlp_bias": (None, True, False),
    "sliding_window": (DROP, None, 5, 0, "8"),
    "use_sliding_window": (None, True, False),
    "layer_types": (None, [FULL] * 2, [SLIDING] * 2, [FULL, SLIDING], []),
    "is_causal": (True, False),
    "quantization_config": (None, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "per_layer_config": ({"0": {"num_key_value_heads": 1}},),
    "text_config": (None, {"rms_norm_eps": 0.1}),
    "rope_theta": (None, 500.0, "10000", 0, math.inf),
    "partial_rotary_factor": (None, 1, 0.5),
    "original_max_position_embeddings": (16, "64"),
    "rope_scaling": (None, {}, LINEAR, {"type": "linear", "factor": 2}, YARN, "linear"),
    "rope_parameters": (
        *(DROP, None, {}, [], "linear"),
        *({"rope_type": "default", "rope_theta": theta} for theta in (500.0, None, "500")),
        *({"rope_type": "linear", "type": kind, "factor": 4.0} for kind in ("yarn", "default")),
        *(LINEAR | {"factor": factor} for factor in (2, 0.5, None, "4", 0)),
        *(LINEAR | {"rope_type": kind} for kind in ("dynamic", "longrope", "llama3", 5)),
        *({"rope_type": "default", "partial_rotary_factor": factor} for factor in (1.0, 0.5)),
        LLAMA3,
        {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
        LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        LLAMA3 | {"original_max_position_embeddings": 16, "mscale": 2.0},
        {FULL: LINEAR},
    ),
}
# Files from before transformers 5, and files with old and new keys at once.
OLD = {"rope_parameters": DROP, "rope_theta": 500.0}
COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "final_logit_softcapping": 1.0, "n_layer": 1},
    OLD,
    *(OLD | {"rope_scaling": scaling} for scaling in (None, LINEAR, LLAMA3, YARN, [])),
    OLD | {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 900.0}},
    OLD | {"partial_rotary_factor": 0.5},
    {"rope_parameters": YARN, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR, "rope_scaling": YARN},
    {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    *({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": n} for n in (0, 1, 28)),
    {"use_sliding_window": False, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    {"model_type": DROP, "architectures": DROP},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": DROP},
    {"tie_word_embeddings": DROP, "rms_norm_eps": DROP, "hidden_act": DROP, "max_position_embeddings": DROP},
)
CHANGES = ({}, *({key: value} for key, values in VALUES.items() for value in values), *COMBINATIONS)


@torch.no_grad()
def by_transformers(folder: Path, rows: list[Tensor]) -> list[Tensor] | None:
    """Return the logits `[T, V]` of each row; None where transformers does not load the folder or all of its weights,
    or where decoding gives other logits than a whole forward pass."""
    try:
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
        logits = []
        for row in rows:
            logits.append(model(row[None], return_dict=True).logits[0])
            step, cache = [], None
            for block in (row[:PREFILLED], *row[PREFILLED:].split(BLOCK)):
                out = model(block[None], past_key_values=cache, use_cache=True, return_dict=True)
                step, cache = [*step, out.logits[0]], out.past_key_values
            if not torch.allclose(torch.cat(step), logits[-1], rtol=0, atol=TOLERANCE):
                return None
        return None if any(said.values()) else logits
    except Exception:  # of many kinds: whichever line is the first to fail
        return None


def outcome(base: Path, changes: dict[str, Any], plain: list[Tensor], rows: list[Tensor], scratch: Path) -> str:
    """Convert a changed checkpoint, and compare it with what transformers loads from the same folder."""
    changed = scratch / "changed"
    changed.mkdir(parents=True)
    for path in base.iterdir():
        if path.name != "config.json":
            (changed / path.name).symlink_to(path)
    values = json.loads((base / "config.json").read_text()) | changes
    (changed / "config.json").write_text(json.dumps({key: x for key, x in values.items() if x is not DROP}))
    theirs = by_transformers(changed, rows)
    try:
        model = load_model(convert(changed, scratch / "converted").parent, prepack=False)
    except UserError:
        return "both refuse" if theirs is None else "refused here"
    # A config that transformers refuses may be accepted here only if the key has no effect.
    for row, expected in zip(rows, plain if theirs is None else theirs, strict=True):
        ours = model(row[None], torch.arange(len(row))[None], FullKVCache(model.config, 1, len(row)))[0]
        if not torch.allclose(ours, expected, rtol=0, atol=TOLERANCE):
            return "other logits"
    return "equal logits"


@pytest.mark.parametrize("name", BASES)
def test_a_changed_config_has_the_logits_of_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    base, generator = tmp_path / "base", torch.Generator().manual_seed(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    save_folder(random_model(BASES[name]), base)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    plain = by_transformers(base, rows)
    assert plain is not None
    counts: Counter[str] = Counter()
    for number, changes in enumerate(islice(CHANGES, [*BASES].index(name), None, len(BASES))):
        found = outcome(base, changes, plain, rows, tmp_path / f"{number}")
        assert found != "other logits", changes
        counts[found] += 1
    assert counts["equal logits"] > 8 and counts["both refuse"] > 8
