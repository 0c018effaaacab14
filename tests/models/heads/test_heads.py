"""Medusa and EAGLE heads: published weights against plain code, and files that are refused."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaModel

from common.errors import UserError
from kv_cache import FullKVCache
from kv_cache.views import NoCache
from models import load_model
from models.heads.loading import find_head, published
from tests.support.heads import (
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


def plain_eagle(tensors, config):
    """Return a function that runs an EAGLE-1 head over a text by transformers, token by token: it gives the next state,
    from a state and the token after it."""
    model = LlamaModel(LlamaConfig(**config, attn_implementation="sdpa")).double().requires_grad_(False)
    model.load_state_dict({name: x for name, x in tensors.items() if name.startswith("layers.")}, strict=False)
    model.layers[0].input_layernorm = model.norm = torch.nn.Identity()
    cache = DynamicCache()

    def step(state, token):
        x = tensors["fc.weight"] @ torch.cat([tensors["embed_tokens.weight"][token], state]) + tensors.get("fc.bias", 0)
        return model(inputs_embeds=x[None, None], past_key_values=cache).last_hidden_state[0, 0]

    return step


@pytest.mark.parametrize("n_layer,options", [(1, {"bias": True}), (2, {"attention_bias": True})])
def test_an_eagle_1_head_equals_plain_code(tmp_path, n_layer, options):
    """The head runs in blocks over a cache, then step by step from predicted states, and at once without a cache. With
    one layer, it also borrows the target's embedding. EAGLE-3 is compared with the modules of `speculators`. Angles and
    norms of transformers are in float32."""
    tensors, config = eagle_tensors(DEEP, 1, n_layer, **options), eagle_config(DEEP, 1, n_layer, **options)
    saved, target, borrowed = tensors, tiny_model(DEEP), ("output layer",)
    if n_layer == 1:
        tensors["embed_tokens.weight"] = target.tok_embeddings.weight.data
        saved, borrowed = drop("embed_tokens.weight")(tensors), ("embedding", "output layer")
    source = find_head(save_head(tmp_path, saved, config), "eagle", DEEP)
    assert source.borrowed == borrowed
    head = source.load(**FLOAT64)
    head.borrow(target)
    length, n_ahead = 21, 3  # longer than a block
    states = torch.randn(2, length, head.shape.state_dim, dtype=torch.float64)
    tokens = torch.randint(DEEP.vocab_size, (2, length + n_ahead))
    positions = torch.arange(length + n_ahead).expand(2, -1)
    cache = FullKVCache(head.body.config, 2, 40, dtype=torch.float64)
    fused, ours = head.fused(states), []
    for start, end in ((0, 4), (4, length)):
        ours.append(head.advance(fused[:, start:end], tokens[:, start:end], positions[:, start:end], cache))
    for i in range(length, length + n_ahead):
        ours.append(head.advance(ours[-1][:, -1:], tokens[:, i : i + 1], positions[:, i : i + 1], cache))
    found = torch.cat(ours, dim=1)
    for given, row, seen in zip(states, tokens.tolist(), found, strict=True):
        step, given = plain_eagle(tensors, config), [*given, *seen[length - 1 : -1]]
        theirs = torch.stack([step(state, token) for state, token in zip(given, row, strict=True)])
        torch.testing.assert_close(seen, theirs, rtol=1e-3, atol=1e-5)
    close(head.draft_logits(found), target.logits(found))
    alone = head.advance(fused, tokens[:, :length], positions[:, :length], NoCache(positions[:, :length]))
    close(alone, found[:, :length])
    own = published(head)
    assert own.keys() == saved.keys() and all(torch.equal(x, saved[name].to(x)) for name, x in own.items())


def eagle(named, damage=dict, target=DEEP, **config):
    """Return an EAGLE-3 head that does not fit `target`, and what the refusal names."""
    tensors = damage(eagle_tensors(DEEP, n_draft=config.get("draft_vocab_size")))
    return "eagle", target, tensors, eagle_config(DEEP, **config), named


def medusa(named, damage=dict, **config):
    return "medusa", TINY, damage(medusa_tensors(TINY)), {"medusa_num_heads": 4, "medusa_num_layers": 2} | config, named


def dflash(named, **config):
    return "dflash", DEEP, DFLASH, dflash_config(DEEP, **config), named


def chained(named, kind, **config):
    return "dflash", DEEP, DFLASH, SPECULATORS | {"speculators_model_type": kind} | config, named


DFLASH, SLIDING = dflash_tensors(DEEP), {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
SPECULATORS = {"transformer_layer_config": eagle_config(DEEP, 1, 2) | {"model_type": "qwen3"}, "mask_token_id": 3}
SPECULATORS |= {"aux_hidden_state_layer_ids": [0, 1, 5]}
NO_SIZE = eagle_config(DEEP) | {"model_type": "qwen3", "layer_types": ["sliding_attention"]}
BAD = {
    "wrong vocabulary": eagle("vocab_size", target=replace(DEEP, vocab_size=60)),
    "a misshapen tensor": eagle("fc.weight (32, 64)", put("fc.weight", torch.zeros(32, 64))),
    "NaN": eagle("norm.weight", put("norm.weight", torch.full((32,), float("nan")))),
    "a shallow target": eagle("[2, 2, 1]", target=replace(TINY, n_layer=4)),  # whose layer 2 it would read twice
    "no such layers": eagle("[1, 3, 8]", eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
    "no map": eagle("d2t", drop("d2t"), draft_vocab_size=20),
    "an output layer of other ids": eagle("lm_head.weight", drop("lm_head.weight"), draft_vocab_size=20),
    "layers that are not causal": eagle("is_causal", is_causal=False),
    "a window without a size": eagle("sliding_window", transformer_layer_config=NO_SIZE),
    "P-EAGLE without its states": eagle("mask_hidden", speculators_model_type="peagle", mask_token_id=3),
    "full layers that are causal": dflash("is_causal", is_causal=True),
    "windows that are not causal": dflash("is_causal", **SLIDING, is_causal=False),
    "another depth": dflash("num_target_layers", num_target_layers=8),
    "layers out of order": dflash("[2, 0, 4]", target_layer_ids=[2, 0, 4]),
    "no mask": dflash("mask_token_id", mask_token_id=None),
    "a setting that is not known": dflash("tree_width", dflash_config={"mask_token_id": 3, "tree_width": 2}),
    "an option of the other layout": dflash("sample_from_anchor", sample_from_anchor=True),
    "a recurrent state from masks": chained("anchor", "dspark", markov_head_type="rnn", sample_from_anchor=False),
    "no Markov bias": chained("markov_head.markov_w1.weight", "dspark"),
    "a part of the ids": chained("draft_vocab_size", "dflash2", draft_vocab_size=20),
    "groups that do not divide": chained("conv_group_size", "dflash2", conv_group_size=5),
    "fewer Medusa heads": medusa("4.0.linear", medusa_num_heads=5),
    "no Medusa bias": medusa("2.1.linear.bias", drop("2.1.linear.bias")),
    "a misshapen Medusa head": medusa("0.2.weight (60, 32)", put("0.2.weight", torch.zeros(60, 32))),
}


@pytest.mark.parametrize("bad", BAD)
def test_heads_that_do_not_fit_are_refused(tmp_path, bad):
    kind, target, tensors, config, named = BAD[bad]
    file = "medusa_lm_head.pt" if kind == "medusa" else "model.safetensors"
    with pytest.raises(UserError) as refused:
        find_head(save_head(tmp_path, tensors, config, file), kind, target).load(**FLOAT64)
    assert named in str(refused.value) and "fix:" in str(refused.value)


def test_heads_of_blocks_that_fit_are_taken(tmp_path):
    """Also with a copy of the target's embedding, which is not read, and a DSpark head without a bias."""
    tensors = DFLASH | {"embed_tokens.weight": torch.zeros(DEEP.vocab_size, DEEP.dim)}
    head = find_head(save_head(tmp_path / "dflash", tensors, dflash_config(DEEP)), "dflash", DEEP)
    assert (head.most_drafts, head.borrowed) == (7, ("embedding", "output layer"))
    *_, config, _ = chained("", "dspark", markov_rank=0)
    assert find_head(save_head(tmp_path / "dspark", DFLASH, config), "dflash", DEEP).most_drafts == 8


def test_a_dflash_head_reads_evenly_spread_layers_by_default(tmp_path):
    for n_layer, inputs_of in ((1, (4,)), (2, (2, 5)), (3, (2, 3, 5))):
        tensors, width = dflash_tensors(DEEP, n_layer), DEEP.dim * n_layer
        tensors["fc.weight"] = torch.zeros(DEEP.dim, width)
        path = save_head(tmp_path / str(n_layer), tensors, dflash_config(DEEP, n_layer, target_layer_ids=None))
        assert find_head(path, "dflash", DEEP).shape.inputs_of == inputs_of


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
