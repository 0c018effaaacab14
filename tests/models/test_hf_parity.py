"""The Transformer against the models of transformers, family by family, and on the default model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

from bench.data import load_books
from convert_hf_checkpoint import convert
from engine import ModelRunner
from kv_cache import FullKVCache
from models import llama, load_model
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT
from models.checkpoints.tokenizer import load_tokenizer
from models.llama import Transformer, logits_dtype
from tests.support.hf_tiny import N_TOKENS, SHAPE, llama3_rope, random_model, rope, save_folder
from tests.support.tiny import TINY

TOLERANCE = 1e-5
LENGTHS = [27, 48]  # of the two rows
PREFILLED = [7, 28]  # 20 tokens of each row are left to decode
MOE = {"head_dim": 16, "moe_intermediate_size": 24}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 2}
LONG_FACTOR = [1.0, 1.5, 2.0, 4.0, 7.0]


FAMILIES: dict[str, hf.PreTrainedConfig] = {
    "llama-3.1": hf.LlamaConfig(**SHAPE | llama3_rope(8.0)),
    "smollm2": hf.LlamaConfig(
        **SHAPE | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3} | rope(100000.0)
    ),
    "mistral-0.1": hf.MistralConfig(**SHAPE | {"sliding_window": 11} | rope(10000.0)),
    "qwen2.5": hf.Qwen2Config(**SHAPE | rope(1000000.0)),
    "qwen3": hf.Qwen3Config(**SHAPE | {"head_dim": 22, "num_attention_heads": 10} | rope(1000000.0)),
    "qwen3 tied, extended": hf.Qwen3Config(
        **SHAPE | {"head_dim": 32, "num_attention_heads": 7, "num_key_value_heads": 1, "attention_bias": True},
        tie_word_embeddings=True,
        **rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "smollm3": hf.SmolLM3Config(
        **SHAPE | NO_SPECIAL_TOKENS | rope(1000000.0), no_rope_layers=[0, 1], tie_word_embeddings=False
    ),
    "qwen3-moe": hf.Qwen3MoeConfig(
        **SHAPE | MOE | rope(1000000.0), num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "phi-4": hf.Phi3Config(  # 10 of 20 elements of a head are rotated
        **SHAPE | NO_SPECIAL_TOKENS | {"hidden_size": 80, "original_max_position_embeddings": 16},
        **rope(10000.0, "longrope", partial_rotary_factor=0.5, short_factor=[1.0] * 5, long_factor=LONG_FACTOR),
    ),
    "dynamic": hf.LlamaConfig(**SHAPE, **rope(10000.0, "dynamic", factor=4.0)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    """A family's model by transformers, converted: the folder, two rows of tokens, the logits `[T, V]` of each."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(FAMILIES[request.param])
    save_folder(model, folder)
    convert(folder, folder)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    logits = [model(row[None]).logits[0] for row in rows]
    assert all(0.3 < float(x.std()) < 3 for x in logits), "the tolerance is absolute, for logits of order 1"
    return folder, rows, logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


# Prefilled whole, or in chunks: 18 is beyond a packed block. 20 tokens that are left divide into blocks.
@pytest.mark.parametrize("prepack, chunk, block", [(True, 48, 1), (False, 18, 4)])
def test_prefill_and_cached_decoding_have_the_logits_of_transformers(
    case: tuple[Path, list, list], prepack: bool, chunk: int, block: int
) -> None:
    folder, rows, expected = case
    model = load_model(folder, prepack=prepack)
    runner = ModelRunner(model, FullKVCache(model.config, len(rows), max(LENGTHS)), chunk)
    for i, (row, theirs, length) in enumerate(zip(rows, expected, PREFILLED, strict=True)):
        cache = FullKVCache(model.config, 1, len(row))
        assert_close(model(row[None], torch.arange(len(row))[None], cache)[0], theirs)
        assert_close(runner.prefill(i, row.tolist()).logits, theirs[-1])
        assert_close(runner.prefill(i, row[:length].tolist()).logits, theirs[length - 1])
    starts = torch.tensor(PREFILLED)
    for done in range(0, LENGTHS[0] - PREFILLED[0], block):
        positions = starts[:, None] + done + torch.arange(block)
        tokens = torch.stack([row[at] for row, at in zip(rows, positions, strict=True)])
        theirs = torch.stack([logits[at] for logits, at in zip(expected, positions, strict=True)])
        assert_close(runner.step(tokens, positions), theirs)


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (3,), ()])
def test_a_16_bit_head_gives_float32(tied, shape, monkeypatch):
    """Logits of a block, of the last token of each row, and of a single token, where a GPU is named."""
    monkeypatch.setattr(llama, "logits_dtype", lambda dtype, device: logits_dtype(dtype, CUDA))
    with torch.device("meta"):
        model = Transformer(replace(TINY, tie_embeddings=tied)).to(torch.bfloat16)
        logits = model.logits(torch.empty(*shape, TINY.dim, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32 and logits.shape == (*shape, TINY.vocab_size)
    assert logits_dtype(torch.float64, CUDA) == torch.float64 and logits_dtype(torch.bfloat16, CPU) == torch.bfloat16


PASSAGE = 100_000  # in the book: prose, not the licence or the table of contents
PARITY_TOKENS = 300
# Both dequantise the same file to float32, and logits have a deviation of 8: 1e-4 is what rounding makes of it.
LOGIT_TOLERANCE = 1e-3
MIXED_TEXT = """CHAPTER XXIII. "My dear Mr. Bennet," said his lady -- 'have you heard...?'
  In 1813 it cost 18s.; 3 vols. at $1,234.56 (or 99.9%) isn't cheap!\t\tE=mc^2; naïve café, “quotes” — 日本語 🙂

def f(x): return x[0]**2  # 007
"""


@pytest.fixture(scope="module")
def gguf_name() -> str:
    names = [path.name for path in DEFAULT_CHECKPOINT.glob("*.gguf")]
    if len(names) != 1 or not (DEFAULT_CHECKPOINT / "model.pth").is_file() or not DEFAULT_BOOK.is_file():
        pytest.fail("run `make demo` once, which fetches and converts the default model")
    return names[0]


@pytest.mark.slow
@torch.inference_mode()
def test_logits_of_the_default_model_are_those_of_transformers(gguf_name: str) -> None:
    text = next(load_books("default"))[PASSAGE : PASSAGE + 4000]
    tokens = torch.tensor([load_tokenizer(DEFAULT_CHECKPOINT).encode(text)[:PARITY_TOKENS]])
    theirs = hf.AutoModelForCausalLM.from_pretrained(DEFAULT_CHECKPOINT, gguf_file=gguf_name, dtype=torch.float32)
    expected = theirs.eval()(tokens).logits
    model = load_model(DEFAULT_CHECKPOINT)
    cache = FullKVCache(model.config, 1, PARITY_TOKENS)
    logits = model(tokens, torch.arange(PARITY_TOKENS)[None], cache)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_tokens_of_the_default_model_are_those_of_transformers(gguf_name: str) -> None:
    tokenizer = load_tokenizer(DEFAULT_CHECKPOINT)
    theirs = hf.AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT, gguf_file=gguf_name)
    for text in (MIXED_TEXT, next(load_books("default"))[PASSAGE : PASSAGE + 20_000]):
        assert tokenizer.encode(text) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
