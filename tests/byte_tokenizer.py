"""A byte-level tokenizer, as a file of the tokenizers package."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS = "<s>"


def save_tokenizer(
    folder: Path,
    vocabulary: Sequence[str],
    merges: Sequence[tuple[str, str]] = (),
    adds_bos: bool = False,
    longest: int | None = None,
) -> None:
    """tokenizer.json. longest: what it cuts texts to, which its users must not."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS] if BOS in vocabulary else [])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    if longest is not None:
        tokenizer.enable_truncation(longest)
    tokenizer.save(str(folder / "tokenizer.json"))
