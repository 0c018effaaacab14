"""The stored configurations against what their repositories publish."""

from models.config import RopeScaling
from models.presets import PRESETS, preset_config

# Parameters; what their number does not see: heads, KV heads, head_dim, rope_theta, context.
LLAMA_2, TINYLLAMA, SMOLLM = (32, 32, 128, 1e4, 4096), (32, 4, 64, 1e4, 2048), (9, 3, 64, 1e5, 8192)
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": (6_738_415_616, LLAMA_2),
    "togethercomputer/LLaMA-2-7B-32K": (6_738_415_616, (*LLAMA_2[:-1], 32768)),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (1_100_048_384, TINYLLAMA),
    "TinyLlama/TinyLlama_v1.1": (1_100_048_384, TINYLLAMA),
    "JackFram/llama-68m": (68_030_208, (12, 12, 64, 1e4, 2048)),
    "meta-llama/Meta-Llama-3-8B": (8_030_261_248, (32, 8, 128, 5e5, 8192)),
    "meta-llama/Meta-Llama-3.1-8B": (8_030_261_248, (32, 8, 128, 5e5, 131072)),
    "meta-llama/Meta-Llama-3.1-70B": (70_553_706_496, (64, 8, 128, 5e5, 131072)),
    "meta-llama/Llama-3.2-1B": (1_235_814_400, (32, 8, 64, 5e5, 131072)),
    "meta-llama/Llama-3.2-3B": (3_212_749_824, (24, 8, 128, 5e5, 131072)),
    "HuggingFaceTB/SmolLM2-135M": (134_515_008, SMOLLM),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (134_515_008, SMOLLM),
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, (32, 8, 128, 1e4, 32768)),
    "mistralai/Mistral-7B-v0.3": (7_248_023_552, (32, 8, 128, 1e6, 32768)),
    "01-ai/Yi-1.5-6B": (6_061_035_520, (32, 4, 128, 5e6, 4096)),
    "Qwen/Qwen2.5-7B": (7_615_616_512, (28, 4, 128, 1e6, 131072)),
    "Qwen/Qwen2.5-0.5B": (494_032_768, (14, 2, 64, 1e6, 32768)),
    "Qwen/Qwen3-0.6B": (596_049_920, (16, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-1.7B": (1_720_574_976, (16, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-4B": (4_022_468_096, (32, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-8B": (8_190_735_360, (32, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-14B": (14_768_307_200, (40, 8, 128, 1e6, 40960)),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, (32, 4, 128, 1e6, 40960)),
    "Qwen/Qwen3-32B": (32_762_123_264, (64, 8, 128, 1e6, 40960)),
}


def test_presets_are_what_is_published():
    presets = {name: preset_config(name) for name in PRESETS}
    shapes = {name: (c.n_head, c.n_kv_head, c.head_dim, c.rope_theta, c.max_context) for name, c in presets.items()}
    assert {name: (config.n_parameters, shapes[name]) for name, config in presets.items()} == PUBLISHED


def test_context_extensions_windows_and_biases():
    assert preset_config("togethercomputer/LLaMA-2-7B-32K").rope_scaling == RopeScaling("linear", 8.0)
    assert preset_config("meta-llama/Meta-Llama-3.1-8B").rope_scaling == RopeScaling("llama3", 8.0)
    assert preset_config("meta-llama/Llama-3.2-1B").rope_scaling == RopeScaling("llama3", 32.0)
    assert preset_config("meta-llama/Meta-Llama-3-8B").rope_scaling is None
    assert preset_config("mistralai/Mistral-7B-v0.1").sliding_window == 4096
    assert preset_config("mistralai/Mistral-7B-v0.3").sliding_window is None
    assert preset_config("Qwen/Qwen2.5-7B").qkv_bias
    assert not preset_config("meta-llama/Meta-Llama-3.1-8B").qkv_bias
