"""Tokenizers: both file formats, BOS only where the model has one, damaged files refused by name."""

import io
from pathlib import Path

import pytest
import sentencepiece
from checkpoint_folders import ALPHABET, BOS, save_tokenizer

from common.errors import CheckpointError
from models.checkpoints.tokenizer import load_tokenizer

TEXT = "It is a truth universally acknowledged, that 12 naïve men must be in want of a wife.\n\n  “Yes.”"


def write_json(folder: Path, bos: bool) -> None:
    save_tokenizer(folder, [BOS, *ALPHABET, "th"], [("t", "h")], adds_bos=bos, longest=4)


def write_sentencepiece(folder: Path, bos: bool) -> None:
    model = io.BytesIO()
    kind = {"model_type": "bpe", "vocab_size": 300, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2}
    kind |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    kind |= {"bos_id": 1, "eos_id": 2} if bos else {"bos_id": -1, "eos_id": 1}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter([TEXT] * 20), model_writer=model, **kind)
    (folder / "tokenizer.model").write_bytes(model.getvalue())


WRITERS = {"tokenizer.json": write_json, "tokenizer.model": write_sentencepiece}


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_round_trip_and_bos(tmp_path: Path, name: str, bos: bool) -> None:
    WRITERS[name](tmp_path, bos)
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode(TEXT, add_bos=False)
    assert len(plain) > 10
    assert len(tokenizer.encode(TEXT)) == len(plain) + bos
    assert tokenizer.encode(TEXT)[bos:] == plain
    assert tokenizer.decode(plain) == tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert max(plain) < len(tokenizer.pieces())
    assert all(isinstance(token, int) for token in plain)


@pytest.mark.parametrize("name", WRITERS)
def test_ids_without_a_token_have_no_text(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path, True)
    tokenizer = load_tokenizer(tmp_path)
    ids, n = tokenizer.encode("naïve", add_bos=False), len(tokenizer.pieces())
    assert tokenizer.decode([*ids, n, n + 60]) == "naïve" and tokenizer.decode([n]) == ""


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"type"', b"\x00\xff\xfe garbage"])
@pytest.mark.parametrize("name", WRITERS)
def test_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)
