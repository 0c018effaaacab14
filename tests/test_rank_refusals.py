"""Vocabularies of a draft and a target that differ in padding."""

import pytest
from hf_tiny import N_TOKENS
from programs import benchmark
from rank_jobs import N_PADDED, N_PROMPTS, copy_edited


def with_vocabulary(change):
    """Edits a tokenizer.json."""
    return lambda content: content | {"model": content["model"] | {"vocab": change(content["model"]["vocab"])}}


@pytest.mark.parametrize("longer", ["draft's config", "draft's tokenizer", "target's config"])
def test_a_padded_vocabulary_is_accepted_with_a_note(longer, models, tmp_path):
    more = ""
    if longer == "draft's tokenizer":
        extra = {f"<extra {index}>": index for index in range(N_TOKENS, N_PADDED)}
        change = with_vocabulary(lambda vocabulary: vocabulary | extra)
        copy_edited(models.padded, tmp_path / "padded", "tokenizer.json", change)
        more = f"--model {tmp_path / 'padded'}"
    if longer == "target's config":
        more = f"--target {models.padded} --model {models.draft}"
    ended = benchmark("longspec", models.arguments("longspec", more, draft="padded"))
    assert ended.record["identical_sequences"] == N_PROMPTS
    notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: only padded has the token ids {N_TOKENS} to {N_PADDED - 1}, which are never drafted"]
