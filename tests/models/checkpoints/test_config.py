"""ModelConfig: presets, changes for a run, and a config.json that is refused or has the logits of transformers."""

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, SmolLM3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import UserError
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models import load_model
from models.checkpoints.config_changes import ConfigChanges
from models.checkpoints.model_source import find_model
from models.checkpoints.presets import preset_config
from tests.support.hf_tiny import LLAMA3_CORNERS, N_TOKENS, SHAPE, random_model, rope, save_folder

# Parameters; what their number does not see: heads, KV heads, head_dim, rope_theta, context.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": (6_738_415_616, (32, 32, 128, 1e4, 4096)),
    "JackFram/llama-68m": (68_030_208, (12, 12, 64, 1e4, 2048)),
    "meta-llama/Meta-Llama-3.1-8B": (8_030_261_248, (32, 8, 128, 5e5, 131072)),
    "meta-llama/Llama-3.2-1B": (1_235_814_400, (32, 8, 64, 5e5, 131072)),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (134_515_008, (9, 3, 64, 1e5, 8192)),
    "mistralai/Mistral-7B-v0.3": (7_248_023_552, (32, 8, 128, 1e6, 32768)),
    "Qwen/Qwen2.5-0.5B": (494_032_768, (14, 2, 64, 1e6, 32768)),
    "Qwen/Qwen3-8B": (8_190_735_360, (32, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, (32, 4, 128, 1e6, 40960)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_shapes(name: str) -> None:
    c = preset_config(name)
    assert (c.n_parameters, (c.n_head, c.n_kv_head, c.head_dim, c.rope_theta, c.max_context)) == PUBLISHED[name]


TOLERANCE = 1e-5  # of logits of order 1, in float32
LENGTH, PREFILLED, BLOCK = 48, 15, 11
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
    "architectures": (DROP, None, ["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["LlamaModel"]),
    "model_type": (DROP, "mistral", "qwen3"),
    "vocab_size": (DROP, 64, float(N_TOKENS)),
    "hidden_size": (DROP, 32, "64"),
    "intermediate_size": (DROP, 95),
    "num_hidden_layers": (DROP, 1, 3),
    "num_attention_heads": (DROP, 2, 8, 0),
    "num_experts": (4, 2),
    "num_experts_per_tok": (DROP, 1, 5, "2"),
    "norm_topk_prob": (True, 1),
    "no_rope_layers": (None, [0, 1, 1], [True, False]),
    "no_rope_layer_interval": (2, 0, "2"),
    "num_key_value_heads": (DROP, None, 1, 3),
    "head_dim": (DROP, None, 8, 16, "16", 0),
    "max_position_embeddings": (DROP, None, 16, "128"),
    "rms_norm_eps": (DROP, 0.1, -1e-5, math.nan),
    "hidden_act": (DROP, "gelu", "swish"),
    "tie_word_embeddings": (DROP, None, True, 1, "true"),
    "eos_token_id": (None, 7, [3, 4], -1, "2"),
    "attention_bias": (None, True, False, 0),
    "mlp_bias": (None, True, False),
    "sliding_window": (DROP, None, 5, 0, "8"),
    "use_sliding_window": (None, True, False),
    "layer_types": (None, [FULL] * 2, [SLIDING] * 2, [FULL, SLIDING], []),
    "quantization_config": (None, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "rope_theta": (None, 500.0, "10000", 0, math.inf),
    "partial_rotary_factor": (None, 1, 0.5),
    "rope_scaling": (None, {}, LINEAR, {"type": "linear", "factor": 2}, YARN, "linear"),
    "rope_parameters": (
        *(DROP, None, {}, [], "linear"),
        *({"rope_type": "default", "rope_theta": theta} for theta in (500.0, None, "500")),
        *({"rope_type": "linear", "type": kind, "factor": 4.0} for kind in ("yarn", "default")),
        *(LINEAR | {"factor": factor} for factor in (2, 0.5, None, "4", 0)),
        *(LINEAR | {"rope_type": kind} for kind in ("dynamic", "longrope", "llama3", 5)),
        LLAMA3,
        LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        LLAMA3 | {"original_max_position_embeddings": 16, "mscale": 2.0},
        {FULL: LINEAR},
        *(YARN | extra for extra in ({"attention_factor": 2.0}, {"attention_factor": "2"}, {"mscale": 0.7})),
        *(YARN | extra for extra in ({"mscale": 0.7, "mscale_all_dim": 1.3}, {"beta_fast": 8.0, "beta_slow": None})),
        *(YARN | extra for extra in ({"truncate": False}, {"original_max_position_embeddings": 16}, {"factor": 0.5})),
    ),
}
# Files from before transformers 5, and files with old and new keys at once.
OLD = {"rope_parameters": DROP, "rope_theta": 500.0}
COMBINATIONS: tuple[dict[str, Any], ...] = (
    {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "final_logit_softcapping": 1.0, "n_layer": 1},
    OLD,
    *(OLD | {"rope_scaling": scaling} for scaling in (None, LINEAR, LLAMA3, YARN, [])),
    OLD | {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 900.0}},
    {"rope_parameters": YARN, "rope_scaling": LINEAR},
    {"rope_parameters": LINEAR, "rope_scaling": YARN},
    *({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": n} for n in (0, 1, 28)),
    {"use_sliding_window": False, "sliding_window": 5, "layer_types": [FULL, SLIDING]},
    {"model_type": DROP, "architectures": DROP},
    {"tie_word_embeddings": DROP, "rms_norm_eps": DROP, "hidden_act": DROP, "max_position_embeddings": DROP},
)
CHANGES = ({}, *({key: value} for key, values in VALUES.items() for value in values), *COMBINATIONS)


@torch.no_grad()
def by_transformers(folder: Path, row: Tensor) -> Tensor | None:
    """Return the logits `[T, V]` of a row; None where transformers does not load the folder or all of its weights, or
    where decoding gives other logits than a whole forward pass."""
    try:
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
        logits, step, cache = model(row[None], return_dict=True).logits[0], [], None
        for block in (row[:PREFILLED], *row[PREFILLED:].split(BLOCK)):
            out = model(block[None], past_key_values=cache, use_cache=True, return_dict=True)
            step, cache = [*step, out.logits[0]], out.past_key_values
        is_same = torch.allclose(torch.cat(step), logits, rtol=0, atol=TOLERANCE)
        return logits if is_same and not any(said.values()) else None
    except Exception:  # of many kinds: whichever line is the first to fail
        return None


def outcome(base: Path, changes: dict[str, Any], plain: Tensor, row: Tensor, scratch: Path) -> str:
    """Convert a changed checkpoint, and compare it with what transformers loads from the same folder."""
    changed = scratch / "changed"
    changed.mkdir(parents=True)
    for path in base.iterdir():
        if path.name != "config.json":
            (changed / path.name).symlink_to(path)
    values = json.loads((base / "config.json").read_text()) | changes
    (changed / "config.json").write_text(json.dumps({key: x for key, x in values.items() if x is not DROP}))
    theirs = by_transformers(changed, row)
    try:
        model = load_model(convert(changed, scratch / "converted").parent, prepack=False)
    except UserError:
        return "both refuse" if theirs is None else "refused here"
    # A config that transformers refuses may be accepted here only if the key has no effect.
    ours = model(row[None], torch.arange(len(row))[None], FullKVCache(model.config, 1, len(row)))[0]
    is_close = torch.allclose(ours, plain if theirs is None else theirs, rtol=0, atol=TOLERANCE)
    return "equal logits" if is_close else "other logits"


@pytest.mark.parametrize("name", BASES)
def test_a_changed_config_has_the_logits_of_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    base, generator = tmp_path / "base", torch.Generator().manual_seed(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    save_folder(random_model(BASES[name]), base)
    row = torch.randint(N_TOKENS, (LENGTH,), generator=generator)
    plain = by_transformers(base, row)
    assert plain is not None
    counts: Counter[str] = Counter()
    for number, changes in enumerate(islice(CHANGES, [*BASES].index(name), None, len(BASES))):
        found = outcome(base, changes, plain, row, tmp_path / f"{number}")
        assert found != "other logits", changes
        counts[found] += 1
    assert counts["equal logits"] > 2 and counts["both refuse"] > 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    config = Qwen3Config(**SHAPE, **rope(1000000.0), head_dim=16, eos_token_id=None)
    save_folder(random_model(config), folder)
    convert(folder, folder)
    return folder


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_an_extended_context_has_the_logits_of_transformers(folder: Path, kind: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    settings = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    theirs = Qwen3Config(**values | {"rope_parameters": settings | {"rope_theta": 1000000.0}})
    model = AutoModelForCausalLM.from_pretrained(folder, config=theirs, attn_implementation="eager")
    row = torch.randint(N_TOKENS, (200,), generator=torch.Generator().manual_seed(1))
    source = find_model(str(folder), "pth", None, "--model", changes=ConfigChanges(f"{kind}:4"))
    ours = source.load()
    assert ours.config == source.config and source.config.max_context == 512
    logits = ours(row[None], torch.arange(len(row))[None], FullKVCache(ours.config, 1, len(row)))
    torch.testing.assert_close(logits, model(row[None]).logits.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        *(ConfigChanges(scaling) for scaling in ("yarn", "yarn:1", "yarn:x", "ntk:2", "yarn:nan")),
        *(ConfigChanges(config_overrides=(override,)) for override in ("rms_norm_epz=0.5", "hidden_act=gelu", "x")),
        ConfigChanges("yarn:2", ('rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}',)),
    ],
)
def test_a_change_without_effect_or_meaning_is_refused(folder: Path, changes: ConfigChanges) -> None:
    with pytest.raises(UserError):
        find_model(str(folder), "pth", None, "", changes=changes)
