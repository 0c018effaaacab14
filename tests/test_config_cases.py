"""No changed config.json is accepted as another model than the one that transformers loads from it.

Each change goes into the config.json of one tiny random checkpoint of each family, in turn.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, random_model, rope, save_folder
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, SmolLM3Config
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
    "qwen3": Qwen3Config(**SHAPE, **rope(10000.0), head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE, **rope(10000.0), head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    ),
    "phi3": Phi3Config(**SHAPE, **rope(10000.0), pad_token_id=None, bos_token_id=None, eos_token_id=2),
    "smollm3": SmolLM3Config(**SHAPE, **rope(10000.0), pad_token_id=None, bos_token_id=None, eos_token_id=2),
}
LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_CORNERS}
FULL, SLIDING = "full_attention", "sliding_attention"
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_dropout", "initializer_range", "temperature"), (0.5,)),
    "architectures": (DROP, None, ["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["LlamaModel"]),
    "model_type": (DROP, None, "llama", "mistral", "qwen3"),
    "vocab_size": (DROP, 64, float(N_TOKENS)),
    "hidden_size": (DROP, 32, 66, "64", True),
    "intermediate_size": (DROP, 95),
    "num_hidden_layers": (DROP, 1, 3),
    "num_attention_heads": (DROP, 2, 8, 0),
    "num_experts": (4, 2),
    "num_experts_per_tok": (DROP, 1, 5, "2"),
    "norm_topk_prob": (True, 1),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": (None, [0]),
    "no_rope_layers": (None, [1, 1], [0, 1, 1], [0], [True, False], "01"),
    "no_rope_layer_interval": (1, 2, 0, None, "2"),
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
    "is_encoder_decoder": (True,),
    "quantization_config": (None, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "per_layer_config": ({"0": {"num_key_value_heads": 1}},),
    "attribute_map": ({"rms_norm_eps": "initializer_range"},),
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
        *(YARN | extra for extra in ({"attention_factor": 2.0}, {"attention_factor": "2"}, {"mscale": 0.7})),
        *(YARN | extra for extra in ({"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale": 0, "mscale_all_dim": 1.0})),
        *(YARN | extra for extra in ({"beta_fast": 8.0, "beta_slow": None}, {"truncate": False}, {"truncate": None})),
        *(YARN | extra for extra in ({"original_max_position_embeddings": 16}, {"factor": None}, {"factor": 0.5})),
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
    {"head_dim": DROP, "num_key_value_heads": DROP},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": DROP},
    {"tie_word_embeddings": DROP, "rms_norm_eps": DROP, "hidden_act": DROP, "max_position_embeddings": DROP},
)
CHANGES = ({}, *({key: value} for key, values in VALUES.items() for value in values), *COMBINATIONS)


def applied(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**values, **changes}.items() if value is not DROP}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: most cases cause a remark."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


@torch.no_grad()
def by_transformers(folder: Path, rows: list[Tensor]) -> list[Tensor] | None:
    """Return the logits `[T, V]` of each row, or None where transformers does not load the folder, weights do not fit,
    or decoding gives other logits than one forward pass."""
    try:
        with quiet():
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


def by_us(source: Path, converted: Path, rows: list[Tensor]) -> list[Tensor]:
    model = load_model(convert(source, converted).parent, prepack=False)
    return [model(row[None], torch.arange(len(row))[None], FullKVCache(model.config, 1, len(row)))[0] for row in rows]


def outcome(base: Path, changes: dict[str, Any], plain: list[Tensor], rows: list[Tensor], scratch: Path) -> str:
    """Convert a changed checkpoint, and compare it with what transformers loads from the same folder."""
    changed = scratch / "changed"
    changed.mkdir(parents=True)
    for path in base.iterdir():
        if path.name != "config.json":
            (changed / path.name).symlink_to(path)
    values = applied(json.loads((base / "config.json").read_text()), changes)
    (changed / "config.json").write_text(json.dumps(values))
    theirs = by_transformers(changed, rows)
    try:
        ours = by_us(changed, scratch / "converted", rows)
    except UserError:
        return "both refuse" if theirs is None else "refused here"
    # What transformers refuses may be accepted here only if the key has no effect.
    expected = plain if theirs is None else theirs
    is_equal = all(torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in zip(ours, expected, strict=True))
    return "equal logits" if is_equal else "other logits"


@pytest.mark.parametrize("name", BASES)
def test_a_changed_config_has_the_logits_of_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    base, generator = tmp_path / "base", torch.Generator().manual_seed(1)
    with quiet():
        save_folder(random_model(BASES[name]), base)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    plain = by_transformers(base, rows)
    assert plain is not None
    counts: Counter[str] = Counter()
    for number, changes in enumerate(islice(CHANGES, [*BASES].index(name), None, len(BASES))):
        found = outcome(base, changes, plain, rows, tmp_path / f"{number}")
        assert found != "other logits", changes
        counts[found] += 1
    assert counts["equal logits"] > 5 and counts["both refuse"] > 5
