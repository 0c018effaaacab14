"""What a rank refuses before it waits for another, and vocabularies of draft and target; all in one process."""

import threading

import pytest
import torch.distributed as dist
from hf_tiny import N_TOKENS
from programs import benchmark
from rank_jobs import N_PADDED, N_PROMPTS, copy_edited

from common.errors import CheckpointError, RankError
from engine.parallel.launch import _tell_user_error


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


@pytest.mark.parametrize("kind", [RankError, CheckpointError])
def test_what_ranks_find_together_is_said_once(kind, monkeypatch, capsys):
    """All ranks, or those of a replica whose leader is not the one that speaks first."""
    store = dist.HashStore()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr("engine.parallel.launch.LINGER_SECONDS", 0)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    error = kind("ranks disagree", where="a round", seen="1 and 2", required="the same", fix="none")
    ranks = [threading.Thread(target=_tell_user_error, args=(error, str(error))) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert capsys.readouterr().err.count("ranks disagree") == 1
