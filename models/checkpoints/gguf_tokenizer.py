"""A tokenizer.json built from the byte-level BPE vocabulary in a GGUF's metadata."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from common.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")


def _pre_tokenizer(name: str) -> PreTokenizer:
    steps: list[PreTokenizer] = []
    if name in ("llama-bpe", "qwen2"):
        pattern = Regex(_SPLIT.format(digits="{1,3}" if name == "llama-bpe" else ""))
        steps = [pre_tokenizers.Split(pattern, behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


def tokenizer_json(path: Path, metadata: dict[str, Any]) -> str:
    """The tokenizer of a GGUF as the text of a tokenizer.json.

    Raises CheckpointError naming a tokenizer that is not rebuilt here, or a vocabulary that is damaged.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        seen, required = f"tokenizer.ggml.model {model}, tokenizer.ggml.pre {pre}", f"gpt2 with one of {PRE_TOKENIZERS}"
        fix = "put tokenizer.json or tokenizer.model of the original model beside the GGUF"
        raise CheckpointError("this GGUF's tokenizer is not supported", path, seen, required, fix)
    try:
        return _build(metadata, pre).to_str()
    except Exception as error:  # the tokenizers package raises plain Exception on a bad vocabulary
        seen, required = f"{type(error).__name__}: {error}", "tokens, token types and merges that belong together"
        fix = "put tokenizer.json of the original model beside the GGUF, or download the GGUF again"
        raise CheckpointError("the GGUF's tokenizer is damaged", path, seen, required, fix) from None


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, {len(vocabulary)} different, {len(types)} types")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    added = {kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added[CONTROL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added[USER_DEFINED]])
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        if bos_id not in range(len(tokens)):
            raise ValueError(f"BOS is token {bos_id} of {len(tokens)}")
        bos = tokens[bos_id]
        template = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
        tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=[(bos, bos_id)])
    return tokenizer
