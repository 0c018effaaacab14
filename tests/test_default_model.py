"""The built-in default model on its own book, against transformers' reading of the same GGUF file."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.data import load_books
from kv_cache import FullKVCache
from models import load_model
from models.checkpoints.default_model import DEFAULT_BOOK, DEFAULT_CHECKPOINT
from models.checkpoints.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

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


@torch.inference_mode()
def test_logits_are_those_of_transformers(gguf_name: str) -> None:
    text = next(load_books("default"))[PASSAGE : PASSAGE + 4000]
    tokens = torch.tensor([load_tokenizer(DEFAULT_CHECKPOINT).encode(text)[:PARITY_TOKENS]])
    theirs = AutoModelForCausalLM.from_pretrained(DEFAULT_CHECKPOINT, gguf_file=gguf_name, dtype=torch.float32)
    expected = theirs.eval()(tokens).logits
    model = load_model(DEFAULT_CHECKPOINT)
    cache = FullKVCache(model.config, 1, PARITY_TOKENS)
    logits = model(tokens, torch.arange(PARITY_TOKENS)[None], cache)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_tokens_are_those_of_transformers(gguf_name: str) -> None:
    tokenizer = load_tokenizer(DEFAULT_CHECKPOINT)
    theirs = AutoTokenizer.from_pretrained(DEFAULT_CHECKPOINT, gguf_file=gguf_name)
    for text in (MIXED_TEXT, next(load_books("default"))[PASSAGE : PASSAGE + 20_000]):
        assert tokenizer.encode(text) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
