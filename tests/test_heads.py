"""Medusa and EAGLE heads: what they compute against a plain reference, and which files are refused."""

from dataclasses import replace

import pytest
import torch
from published_heads import PlainEagle, eagle_config, eagle_tensors, medusa_tensors, plain_medusa, save_head
from tiny import TINY, tiny_model
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import UserError
from kv_cache import FullKVCache
from kv_cache.views import NoCache
from models import load_model
from models.heads.loading import find_head, published

DEEP = replace(TINY, n_layer=7)
FLOAT64 = {"device": "cpu", "dtype": torch.float64}
EAGLES = {
    "EAGLE-1": (1, 1, {"bias": True}),
    "EAGLE-1, no bias, two layers": (1, 2, {"attention_bias": True}),
    "EAGLE-3": (3, 1, {}),
    "EAGLE-3, two layers": (3, 2, {"norm_before_residual": True}),
    "EAGLE-3, normalised inputs": (3, 1, {"fc_norm": True, "norm_output": True}),
    "EAGLE-3, a vocabulary of its own": (3, 1, {"n_draft": 20}),
    "EAGLE-3, keys of its target": (
        3,
        1,
        {"model_type": "qwen2", "sliding_window": 3, "layer_types": ["sliding_attention"]},
    ),
}


SHALLOW = replace(TINY, n_layer=4)  # of which EAGLE-3 would read layer 2 twice


def drop(name):
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def put(name, value):
    return lambda tensors: tensors | {name: value(tensors) if callable(value) else value}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_inputs_of_layers_are_those_that_transformers_gives(checkpoint):
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
def test_medusa_heads_compute_what_was_published(tmp_path, file):
    tensors = medusa_tensors(TINY, n_head=3)
    path = save_head(tmp_path, tensors, {"medusa_num_heads": 2, "medusa_num_layers": 2}, file)
    hidden = torch.randn(4, TINY.dim, dtype=torch.float64)
    for where in (path, f"{path}/{file}"):
        heads = find_head(where, "medusa", TINY).load(**FLOAT64)
        assert len(heads) == 3, "all that the file has"
        for i, head in enumerate(heads):
            for ours, given in zip(head(hidden), hidden, strict=True):
                close(ours, plain_medusa(tensors, i, 2, given))
        assert published(heads).keys() == tensors.keys()


@pytest.mark.parametrize("kind", EAGLES)
def test_an_eagle_head_computes_what_was_published(tmp_path, kind):
    """The head runs in blocks over a cache, then step by step from predicted states, and at once without a cache."""
    version, n_layer, options = EAGLES[kind]
    tensors = eagle_tensors(DEEP, version, n_layer, **options)
    n_draft = options.get("n_draft")
    config = eagle_config(DEEP, version, n_layer, **({"draft_vocab_size": n_draft} if n_draft else options))
    head = find_head(save_head(tmp_path, tensors, config), "eagle", DEEP).load(**FLOAT64)
    head.borrow(target := tiny_model(DEEP))
    length, n_own = 21, 3  # longer than what is run as a block
    states = torch.randn(2, length, head.shape.state_dim, dtype=torch.float64)
    tokens = torch.randint(DEEP.vocab_size, (2, length + n_own))
    positions = torch.arange(length + n_own).expand(2, -1)

    expected, logits = [], []
    for given, row in zip(states, tokens.tolist(), strict=True):
        plain = PlainEagle(tensors, version, n_layer, **options)
        out = [plain.step(plain.fused(state), token) for state, token in zip(given, row, strict=False)]
        for token in row[length:]:
            out.append(plain.step(out[-1], token))
        expected.append(torch.stack(out))
        logits.append(torch.stack([plain.logits(x) if version == 3 else target.logits(x) for x in out]))

    cache = FullKVCache(head.body.config, 2, 40, dtype=torch.float64)
    fused, ours = head.fused(states), []
    for start, end in ((0, 4), (4, length)):
        ours.append(head.advance(fused[:, start:end], tokens[:, start:end], positions[:, start:end], cache))
    for i in range(length, length + n_own):
        ours.append(head.advance(ours[-1][:, -1:], tokens[:, i : i + 1], positions[:, i : i + 1], cache))
    close(torch.cat(ours, dim=1), torch.stack(expected))
    close(head.draft_logits(torch.cat(ours, dim=1)), torch.stack(logits))
    alone = head.advance(fused, tokens[:, :length], positions[:, :length], NoCache(positions[:, :length]))
    close(alone, torch.stack(expected)[:, :length])
    for name, x in published(head).items():
        torch.testing.assert_close(x, tensors[name.replace("layers.0.", "midlayer.") if name not in tensors else name])


def test_what_a_head_lacks_is_the_targets(tmp_path):
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


BAD = {
    "wrong hidden size": (1, DEEP, lambda t: t, {"hidden_size": 48, "target_hidden_size": 48}, "hidden_size"),
    "wrong target": (3, replace(DEEP, dim=48), lambda t: t, {}, "target_hidden_size"),
    "wrong vocabulary": (3, replace(DEEP, vocab_size=60), lambda t: t, {}, "vocab_size"),
    "a misshapen tensor": (3, DEEP, put("fc.weight", torch.zeros(32, 64)), {}, "fc.weight (32, 64)"),
    "another layout": (3, DEEP, put("layers.0.self_attn.q_norm.weight", torch.ones(12)), {}, "q_norm"),
    "NaN": (3, DEEP, put("norm.weight", lambda t: t["norm.weight"] * float("nan")), {}, "norm.weight"),
    "a shallow target": (3, SHALLOW, lambda t: t, {}, "[2, 2, 1]"),
    "layers that there are not": (3, DEEP, lambda t: t, {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "[1, 3, 8]"),
    "a bad size": (3, DEEP, lambda t: t, {"draft_vocab_size": 0}, "draft_vocab_size"),
    "no map": (
        3,
        DEEP,
        put("lm_head.weight", lambda t: t["lm_head.weight"][:9].clone()),
        {"draft_vocab_size": 9},
        "d2t",
    ),
}
# Of each, the version, the target, and the configuration.
MISSING = {
    "layers.0.mlp.up_proj.weight": (1, DEEP, {}),
    "fc.weight": (3, DEEP, {}),
    "layers.0.hidden_norm.weight": (3, DEEP, {}),
    "embed_tokens.weight": (3, replace(DEEP, dim=48), {}),  # not the target's, which is of another width
    "lm_head.weight": (3, DEEP, {"draft_vocab_size": 20}),  # not the target's, which is of other ids
    "d2t": (3, DEEP, {"draft_vocab_size": 20}),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path, bad):
    version, target, damage, config, named = BAD[bad]
    tensors = damage(eagle_tensors(DEEP, version))
    path = save_head(tmp_path, tensors, eagle_config(DEEP, version, **config))
    with pytest.raises(UserError) as refused:
        find_head(path, "eagle", target).load(**FLOAT64)
    assert named in str(refused.value) and "fix:" in str(refused.value)


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named_with_its_file_before_any_size(tmp_path, name):
    version, target, config = MISSING[name]
    tensors = eagle_tensors(DEEP, version, n_draft=config.get("draft_vocab_size"))
    missing = name if name in tensors else name.replace("layers.0", "midlayer")
    damaged = {key: torch.zeros(1, 1) if "down_proj" in key else x for key, x in drop(missing)(tensors).items()}
    path = save_head(tmp_path, damaged, eagle_config(DEEP, version, **config))
    with pytest.raises(UserError) as refused:
        find_head(path, "eagle", target)
    assert name in str(refused.value) and f"{tmp_path}/model.safetensors" in str(refused.value)


@pytest.mark.parametrize(
    "damage,config,named",
    [
        (lambda t: t, {"medusa_num_heads": 5}, "4.0.linear"),
        (lambda t: t, {"medusa_num_layers": "two"}, "medusa_num_layers"),
        (drop("2.1.linear.bias"), {}, "2.1.linear.bias"),
        (put("0.2.weight", torch.zeros(60, 32)), {}, "0.2.weight (60, 32)"),
        (put("0.0.linear.weight", torch.zeros(48, 48)), {}, "0.0.linear.weight (48, 48)"),
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
    for path, kind in ((medusa, "eagle"), (eagle, "medusa")):
        with pytest.raises(UserError, match="layout"):
            find_head(path, kind, DEEP)
    (tmp_path / "e" / "model.safetensors").unlink()
    with pytest.raises(UserError):
        find_head(eagle, "eagle", DEEP)


def test_a_vocabulary_of_its_own_is_part_of_the_targets(tmp_path):
    tensors = eagle_tensors(DEEP, n_draft=20)
    path = save_head(tmp_path, tensors, eagle_config(DEEP, draft_vocab_size=20))
    head = find_head(path, "eagle", DEEP).load(**FLOAT64)
    states = torch.randn(3, 2, head.body.config.dim, dtype=torch.float64)
    logits, known = head.logits(states), head.draft_logits(states)
    assert logits.shape == (3, 2, DEEP.vocab_size)
    ids = [i + offset for i, offset in enumerate(tensors["d2t"].tolist())]
    assert torch.equal(logits[..., ids], known) and int(logits.isinf().sum()) == 6 * (DEEP.vocab_size - 20)
