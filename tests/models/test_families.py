"""Greedy text of each architecture next to transformers', with every policy and storage, on three ragged rows."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig, SmolLM3Config

from common.errors import ConfigError
from convert_hf_checkpoint import convert
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, generate
from kv_cache import FullKVCache
from models import load_model
from models.config import ModelConfig
from models.experts import grouped, looped
from tests.support.hf_tiny import N_TOKENS, SHAPE, random_model, rope, save_folder
from tests.support.policies import POLICIES, SELF_DRAFT_POLICIES, Size

LENGTHS, N_NEW, GAMMA, LONGEST = [5, 38, 17], 20, 3, 64
EXPERTS = ModelConfig(64, 1, 64, 4, 2, 16, 32, n_expert=4, n_expert_per_token=2)
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
YARN = rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=32)
CONFIGS: dict[str, Any] = {
    "qwen3, groups of 5": Qwen3Config(
        **SHAPE | {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 22}, **SPECIAL, **YARN
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
        **SPECIAL | rope(1000000.0) | {"norm_topk_prob": True},
    ),
    "smollm3": SmolLM3Config(**SHAPE, **SPECIAL, **rope(50000.0), no_rope_layer_interval=2),
    "phi3": Phi3Config(**SHAPE | {"hidden_size": 80}, **SPECIAL, **rope(10000.0, partial_rotary_factor=0.5)),
    "llama with biases, groups of 7": LlamaConfig(
        **SHAPE | {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16},
        **SPECIAL | rope(10000.0) | {"attention_bias": True, "mlp_bias": True},
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted random model, with transformers' greedy text next to it in expected.pt."""
    folder = tmp_path_factory.mktemp("family")
    model = random_model(CONFIGS[request.param])
    save_folder(model, folder)
    convert(folder, folder)
    rows = [model.generate(torch.tensor([prompt]), max_new_tokens=N_NEW, do_sample=False)[0] for prompt in prompts()]
    torch.save([row[-N_NEW:].tolist() for row in rows], folder / "expected.pt")
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(N_TOKENS, (n,), generator=generator).tolist() for n in LENGTHS]


def decode(folder: Path, policy: str | None, standalone: bool = False, **how: Any) -> list[list[int]]:
    """Decode greedily with a draft whose cache has that policy, None: without a draft."""
    model = load_model(folder, **how)
    runner = ModelRunner(model, FullKVCache(model.config, len(LENGTHS), LONGEST), prefill_chunk=8)
    drafter: SelfSpeculation | StandaloneDraft | None = None
    if policy is not None:
        cache = POLICIES[policy].make(model.config, Size(len(LENGTHS), LONGEST, 8, GAMMA + 1, torch.float32))
        draft = ModelRunner(load_model(folder, **how), cache)
        drafter = StandaloneDraft(draft, GAMMA) if standalone else SelfSpeculation(runner, cache, GAMMA)
    out = generate(runner, prompts(), max_new_tokens=N_NEW, drafter=drafter)
    assert policy is None or any(sum(row.accepted_at) > 0 for row in out.stats.rows)
    return out.tokens


def test_products_by_expert_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, 16, generator=generator), torch.randn(4, 24, 16, generator=generator)
    counts, layers = torch.tensor([3, 0, 5, 1]), [partial(F.linear, weight=weight) for weight in weights]
    torch.testing.assert_close(grouped(x, weights, counts), looped(x, layers, counts))


@pytest.mark.parametrize("policy", [None, *SELF_DRAFT_POLICIES])
def test_greedy_text_is_that_of_transformers(folder: Path, policy: str | None) -> None:
    assert decode(folder, policy) == torch.load(folder / "expected.pt")


@pytest.mark.parametrize("policy", ["streaming", "streaming, positions in the cache"])
def test_a_standalone_draft_changes_no_token(folder: Path, policy: str) -> None:
    assert decode(folder, policy, standalone=True) == torch.load(folder / "expected.pt")


def test_layers_without_rope_are_known_when_other_layers_are_dropped(tmp_path: Path) -> None:
    config = SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, **SPECIAL, **rope(50000.0), no_rope_layer_interval=2)
    save_folder(random_model(config), tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "some", layers_to_drop=(0, 3))
    assert load_model(tmp_path / "some").config.unrotated_layers == (0,)
    assert load_model(tmp_path / "some", layers=(0, 2)).config.unrotated_layers == (0,)


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    config = load_model("none", load_format="dummy", config=EXPERTS).config
    assert config.n_expert == 4
    with pytest.raises(ConfigError):
        load_model("none", load_format="dummy", config=EXPERTS, quantize="int4")


def test_quantised_weights_give_the_same_text_with_a_draft_and_without(tmp_path: Path) -> None:
    save_folder(random_model(Qwen3Config(**SHAPE, **SPECIAL, **YARN, head_dim=16, attention_bias=True)), tmp_path)
    convert(tmp_path, tmp_path)
    assert decode(tmp_path, "snapkv", quantize="int4") == decode(tmp_path, None, quantize="int4")
