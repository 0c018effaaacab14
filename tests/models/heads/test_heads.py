"""Medusa and EAGLE heads: published weights against plain code, and files that are refused."""

from dataclasses import replace

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import UserError
from kv_cache import FullKVCache
from kv_cache.views import NoCache
from models import load_model
from models.heads.loading import find_head, published
from tests.support.published_heads import (
    PlainEagle,
    dflash_config,
    dflash_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    plain_medusa,
    save_head,
)
from tests.support.tiny import TINY, tiny_model

DEEP = replace(TINY, n_layer=7)
FLOAT64 = {"device": "cpu", "dtype": torch.float64}
SHALLOW = replace(TINY, n_layer=4)  # EAGLE-3 would read its layer 2 twice


def drop(name):
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def put(name, value):
    return lambda tensors: tensors | {name: value}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_inputs_of_layers_are_those_of_transformers(checkpoint):
    tokens, positions = torch.randint(200, (2, 19)), torch.arange(19).expand(2, -1)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    first, second, normed = reference(tokens, output_hidden_states=True).hidden_states
    model = load_model(checkpoint, dtype=torch.float64)
    last, inputs = model.hidden_states(
        tokens, positions, FullKVCache(model.config, 2, 19, dtype=torch.float64), (0, 1, 2)
    )
    before, between, behind = inputs.split(model.config.dim, dim=-1)
    for ours, theirs in ((before, first), (between, second), (model.norm(behind), normed), (last, normed)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_a_medusa_head_equals_plain_code(tmp_path, file):
    tensors = medusa_tensors(TINY, n_head=3)
    path = save_head(tmp_path, tensors, {"medusa_num_heads": 2, "medusa_num_layers": 2}, file)
    hidden = torch.randn(4, TINY.dim, dtype=torch.float64)
    for where in (path, f"{path}/{file}"):
        heads = find_head(where, "medusa", TINY).load(**FLOAT64)
        assert len(heads) == 3, "all that the file has"
        for i, head in enumerate(heads):
            for ours, given in zip(head(hidden), hidden, strict=True):
                close(ours, plain_medusa(tensors, i, given))
        assert published(heads).keys() == tensors.keys()


@pytest.mark.parametrize("n_layer,options", [(1, {"bias": True}), (2, {"attention_bias": True})])
def test_an_eagle_1_head_equals_plain_code(tmp_path, n_layer, options):
    """The head runs in blocks over a cache, then step by step from predicted states, and at once without a cache.
    EAGLE-3 is compared with the modules of `speculators`."""
    tensors = eagle_tensors(DEEP, 1, n_layer, **options)
    path = save_head(tmp_path, tensors, eagle_config(DEEP, 1, n_layer, **options))
    head = find_head(path, "eagle", DEEP).load(**FLOAT64)
    head.borrow(target := tiny_model(DEEP))
    length, n_ahead = 21, 3  # longer than a block
    states = torch.randn(2, length, head.shape.state_dim, dtype=torch.float64)
    tokens = torch.randint(DEEP.vocab_size, (2, length + n_ahead))
    positions, expected = torch.arange(length + n_ahead).expand(2, -1), []
    for given, row in zip(states, tokens.tolist(), strict=True):
        plain = PlainEagle(tensors, n_layer)
        out = [plain.step(state, token) for state, token in zip(given, row, strict=False)]
        for token in row[length:]:
            out.append(plain.step(out[-1], token))
        expected.append(torch.stack(out))
    cache = FullKVCache(head.body.config, 2, 40, dtype=torch.float64)
    fused, ours = head.fused(states), []
    for start, end in ((0, 4), (4, length)):
        ours.append(head.advance(fused[:, start:end], tokens[:, start:end], positions[:, start:end], cache))
    for i in range(length, length + n_ahead):
        ours.append(head.advance(ours[-1][:, -1:], tokens[:, i : i + 1], positions[:, i : i + 1], cache))
    close(torch.cat(ours, dim=1), torch.stack(expected))
    close(head.draft_logits(torch.cat(ours, dim=1)), target.logits(torch.stack(expected)))
    alone = head.advance(fused, tokens[:, :length], positions[:, :length], NoCache(positions[:, :length]))
    close(alone, torch.stack(expected)[:, :length])
    assert all(torch.equal(x, tensors[name].to(x)) for name, x in published(head).items())


def test_a_head_borrows_from_the_target_what_it_lacks(tmp_path):
    target, tensors, config = tiny_model(DEEP), eagle_tensors(DEEP, 1), eagle_config(DEEP, 1)
    tensors["embed_tokens.weight"] = target.tok_embeddings.weight.data.clone()
    same = find_head(save_head(tmp_path / "same", tensors, config), "eagle", DEEP).load(**FLOAT64)
    less = find_head(save_head(tmp_path / "less", drop("embed_tokens.weight")(tensors), config), "eagle", DEEP)
    assert less.borrowed == ("embedding", "output layer")
    less = less.load(**FLOAT64)
    less.borrow(target)
    states, positions = torch.randn(1, 3, DEEP.dim, dtype=torch.float64), torch.arange(3)[None]
    alone = NoCache(positions)
    assert torch.equal(*(head.advance(states, torch.tensor([[5, 0, 7]]), positions, alone) for head in (same, less)))
    assert len([*less.parameters()]) == len([*same.parameters()]) - 1, "what is borrowed stays the target's"


def as_they_are(tensors):
    return tensors


def layers(**options):
    return {"transformer_layer_config": eagle_config(DEEP) | {"model_type": "qwen3"} | options}


P_EAGLE = {"speculators_model_type": "peagle"}
BAD = {
    "wrong vocabulary": (3, replace(DEEP, vocab_size=60), as_they_are, {}, "vocab_size"),
    "a misshapen tensor": (3, DEEP, put("fc.weight", torch.zeros(32, 64)), {}, "fc.weight (32, 64)"),
    "NaN": (3, DEEP, put("norm.weight", torch.full((32,), float("nan"))), {}, "norm.weight"),
    "a shallow target": (3, SHALLOW, as_they_are, {}, "[2, 2, 1]"),
    "no such layers": (3, DEEP, as_they_are, {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "[1, 3, 8]"),
    "no map": (3, DEEP, drop("d2t"), {"draft_vocab_size": 20}, "d2t"),
    "an output layer of other ids": (3, DEEP, drop("lm_head.weight"), {"draft_vocab_size": 20}, "lm_head.weight"),
    "layers that are not causal": (3, DEEP, as_they_are, {"is_causal": False}, "is_causal"),
    "a window without a size": (3, DEEP, as_they_are, layers(layer_types=["sliding_attention"]), "sliding_window"),
    "P-EAGLE without its states": (3, DEEP, as_they_are, P_EAGLE | {"mask_token_id": 3}, "mask_hidden"),
}


@pytest.mark.parametrize("bad", BAD)
def test_eagle_heads_that_do_not_fit_are_refused(tmp_path, bad):
    version, target, damage, config, named = BAD[bad]
    tensors = damage(eagle_tensors(DEEP, version, n_draft=config.get("draft_vocab_size")))
    path = save_head(tmp_path, tensors, eagle_config(DEEP, version, **config))
    with pytest.raises(UserError) as refused:
        find_head(path, "eagle", target).load(**FLOAT64)
    assert named in str(refused.value) and "fix:" in str(refused.value)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
BAD_DFLASH = {
    "full layers that are causal": ({"is_causal": True}, "is_causal"),
    "windows that are not causal": (SLIDING | {"is_causal": False}, "is_causal"),
    "another depth": ({"num_target_layers": 8}, "num_target_layers"),
    "layers out of order": ({"target_layer_ids": [2, 0, 4]}, "[2, 0, 4]"),
    "no mask": ({"mask_token_id": None}, "mask_token_id"),
    "an option of the other layout": ({"sample_from_anchor": True}, "sample_from_anchor"),
}


@pytest.mark.parametrize("bad", BAD_DFLASH)
def test_dflash_heads_that_do_not_fit_are_refused(tmp_path, bad):
    """Without the change, the head is taken, also with a copy of the target's embedding, which is not read."""
    changes, named = BAD_DFLASH[bad]
    tensors = dflash_tensors(DEEP) | {"embed_tokens.weight": torch.zeros(DEEP.vocab_size, DEEP.dim)}
    good = find_head(save_head(tmp_path / "good", tensors, dflash_config(DEEP)), "dflash", DEEP)
    assert (good.most_drafts, good.borrowed) == (7, ("embedding", "output layer"))
    with pytest.raises(UserError) as refused:
        find_head(save_head(tmp_path / "bad", tensors, dflash_config(DEEP, **changes)), "dflash", DEEP)
    assert named in str(refused.value) and "fix:" in str(refused.value)


DSPARK, DFLASH_2 = {"speculators_model_type": "dspark"}, {"speculators_model_type": "dflash2"}
BAD_CHAINS = {
    "a recurrent state from masks": (DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False}, "anchor"),
    "no bias": (DSPARK, "markov_head.markov_w1.weight"),
    "a part of the ids": (DFLASH_2 | {"draft_vocab_size": 20}, "draft_vocab_size"),
    "groups that do not divide": (DFLASH_2 | {"conv_group_size": 5}, "conv_group_size"),
}


@pytest.mark.parametrize("bad", BAD_CHAINS)
def test_dspark_and_dflash_2_heads_that_do_not_fit_are_refused(tmp_path, bad):
    """The tensors are those of a DSpark head without a bias."""
    changes, named = BAD_CHAINS[bad]
    config = {"transformer_layer_config": eagle_config(DEEP, 1, 2) | {"model_type": "qwen3"}, "mask_token_id": 3}
    config |= {"aux_hidden_state_layer_ids": [0, 1, 5]}
    good = save_head(tmp_path / "good", dflash_tensors(DEEP), config | DSPARK | {"markov_rank": 0})
    assert find_head(good, "dflash", DEEP).most_drafts == 8
    with pytest.raises(UserError) as refused:
        find_head(save_head(tmp_path / "bad", dflash_tensors(DEEP), config | changes), "dflash", DEEP)
    assert named in str(refused.value) and "fix:" in str(refused.value)


def test_a_dflash_head_reads_evenly_spread_layers_by_default(tmp_path):
    for n_layer, inputs_of in ((1, (4,)), (2, (2, 5)), (3, (2, 3, 5))):
        tensors, width = dflash_tensors(DEEP, n_layer), DEEP.dim * n_layer
        tensors["fc.weight"] = torch.zeros(DEEP.dim, width)
        path = save_head(tmp_path / str(n_layer), tensors, dflash_config(DEEP, n_layer, target_layer_ids=None))
        assert find_head(path, "dflash", DEEP).shape.inputs_of == inputs_of


@pytest.mark.parametrize(
    "damage,config,named",
    [
        (as_they_are, {"medusa_num_heads": 5}, "4.0.linear"),
        (drop("2.1.linear.bias"), {}, "2.1.linear.bias"),
        (put("0.2.weight", torch.zeros(60, 32)), {}, "0.2.weight (60, 32)"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(tmp_path, damage, config, named):
    values = {"medusa_num_heads": 4, "medusa_num_layers": 2} | config
    path = save_head(tmp_path, damage(medusa_tensors(TINY)), values, "medusa_lm_head.pt")
    with pytest.raises(UserError) as refused:
        find_head(path, "medusa", TINY)
    assert named in str(refused.value)


def test_a_head_of_the_other_kind_is_refused(tmp_path):
    medusa = save_head(tmp_path / "m", medusa_tensors(DEEP), {"medusa_num_heads": 4}, "medusa_lm_head.pt")
    eagle = save_head(tmp_path / "e", eagle_tensors(DEEP), eagle_config(DEEP))
    for path, kind in ((medusa, "eagle"), (eagle, "medusa"), (eagle, "dflash"), (medusa, "dflash")):
        with pytest.raises(UserError, match="layout"):
            find_head(path, kind, DEEP)


def test_the_ids_of_a_smaller_vocabulary_are_mapped_to_the_targets(tmp_path):
    tensors = eagle_tensors(DEEP, n_draft=20)
    path = save_head(tmp_path, tensors, eagle_config(DEEP, draft_vocab_size=20))
    head = find_head(path, "eagle", DEEP).load(**FLOAT64)
    states = torch.randn(3, 2, head.body.config.dim, dtype=torch.float64)
    logits, known = head.logits(states), head.draft_logits(states)
    assert logits.shape == (3, 2, DEEP.vocab_size)
    ids = [i + offset for i, offset in enumerate(tensors["d2t"].tolist())]
    assert torch.equal(logits[..., ids], known) and int(logits.isinf().sum()) == 6 * (DEEP.vocab_size - 20)
