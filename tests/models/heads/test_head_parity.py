"""Heads in the layouts of `speculators` against its modules, with random weights that it saves.

Its norms and its softmax are in float32, even over weights in float64, which bounds how closely logits agree.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from kv_cache import FullKVCache
from models.heads.loading import find_head, published
from tests.support import heads
from tests.support.tiny import TINY, tiny_model

DEEP = replace(TINY, n_layer=7)
LENGTH, BLOCK, WINDOW, MASK = 20, 4, 5, DEEP.vocab_size - 1
MIXED, SLIDING = ["sliding_attention", "full_attention"], ["sliding_attention", "sliding_attention"]
LAYERS: dict[str, Any] = heads.eagle_config(DEEP, 1) | {"sliding_window": WINDOW, "use_sliding_window": False}
LAYERS |= {"layer_types": None, "attention_bias": False, "mlp_bias": False}
LAYERS["rope_parameters"] = {"rope_type": "default", "rope_theta": LAYERS.pop("rope_theta")}
YARN = {"rope_type": "yarn", "rope_theta": heads.THETA, "factor": 8.0, "original_max_position_embeddings": 32}
MODULES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel", "dflash": "DFlashDraftModel"}
MODULES |= {"dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Run modules of `speculators` as they are: it compiles them where there is a GPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def core(kind: str) -> ModuleType:
    """Import a kind of heads of `speculators`, without its data sets: those need pandas, pyarrow and more."""
    unused = ModuleType("speculators.train.data")
    unused.BatchType = dict
    sys.modules.setdefault("speculators.train.data", unused)
    return import_module(f"speculators.models.{kind}.core")


def reference(folder: Path, kind: str, layers: type = Qwen3Config, **options: Any) -> nn.Module:
    """Return a module of `speculators` with random weights in float64, which it saved in `folder`.

    options: of its config, or of its decoder layers.
    """
    types = options.get("layer_types") or []
    given = {name: options.pop(name, usual) for name, usual in LAYERS.items()}
    given |= {"num_hidden_layers": len(types) or given["num_hidden_layers"], "use_sliding_window": bool(types)}
    config, module = layers(**given), getattr(core(kind), MODULES[kind])
    config._attn_implementation = "eager"
    settings = {"draft_vocab_size": DEEP.vocab_size, "mask_token_id": MASK} | options
    model = module(module.config_class(transformer_layer_config=config, **settings))
    tensors = heads.random_tensors({name: tuple(x.shape) for name, x in model.named_parameters()})
    if model.d2t is not None:
        ids = torch.arange(len(model.d2t)) * 2 + 1
        is_drafted = torch.zeros(DEEP.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.save_pretrained(folder)
    return model.eval().requires_grad_(False)


def load(folder: Path, kind: str) -> Any:
    """Return the head in a folder, whose tensors have their published names again."""
    head = find_head(str(folder), kind, DEEP).load(device="cpu", dtype=torch.float64)
    saved, ours = load_file(folder / "model.safetensors"), published(head)
    saved = {part: x for part, x in saved.items() if not part.startswith("confidence_head.")}
    assert ours.keys() == saved.keys() and all(torch.equal(x, saved[part]) for part, x in ours.items())
    return head


def texts(width: int) -> dict[str, Tensor]:
    """Return the inputs of two texts as `speculators` packs them, in a row."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 2 * LENGTH, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(DEEP.vocab_size, (1, 2 * LENGTH), generator=generator)
    document_ids = torch.arange(2 * LENGTH)[None] // LENGTH
    position_ids = torch.arange(2 * LENGTH)[None] % LENGTH
    loss_mask, last = torch.ones_like(tokens), torch.zeros(1, 2 * LENGTH, DEEP.dim, dtype=torch.float64)
    given = {"hidden_states": states, "input_ids": tokens, "document_ids": document_ids, "position_ids": position_ids}
    return given | {"loss_mask": loss_mask, "verifier_last_hidden_states": last}


def in_rows(packed: Tensor) -> Tensor:
    return packed[0].unflatten(0, (2, -1))


def positions_from(*starts: int, n: int) -> Tensor:
    return torch.tensor(starts)[:, None] + torch.arange(n)


def cache_of(head: Any) -> FullKVCache:
    return FullKVCache(head.body.config, 2, 2 * LENGTH, dtype=torch.float64)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


EAGLES: dict[str, tuple[type, dict[str, Any]]] = {
    "Llama": (LlamaConfig, {}),
    "Llama, biases": (LlamaConfig, {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "Llama, windows": (LlamaConfig, {"layer_types": SLIDING, "norm_before_residual": True}),
    "Qwen3": (Qwen3Config, {"norm_before_fc": True, "draft_vocab_size": 30}),
    "Qwen3, biases": (Qwen3Config, {"attention_bias": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 5, 7]}),
    "Qwen3, windows": (Qwen3Config, {"layer_types": MIXED, "rope_parameters": YARN}),
    "EAGLE-3.1": (Qwen3Config, {"fc_norm": True, "norm_output": True}),
    "EAGLE-3.1, norm before fc": (LlamaConfig, {"norm_before_fc": True, "norm_output": True}),
}


@pytest.mark.parametrize("name", EAGLES)
def test_eagle_3(tmp_path, name):
    """Texts, then two steps from drafted states. In training, a window of `speculators` does not move with steps."""
    layers, options = EAGLES[name]
    model, steps = reference(tmp_path, "eagle3", layers, **options), 1 if "layer_types" in options else 3
    head = load(tmp_path, "eagle")
    given, theirs = texts(head.shape.state_dim), []
    model.lm_head.register_forward_hook(lambda _, args, logits: theirs.append(in_rows(logits)))
    unscored = {key: x for key, x in given.items() if key != "verifier_last_hidden_states"}
    model(**unscored, ttt_steps=steps)
    states, tokens = in_rows(given["hidden_states"]), in_rows(given["input_ids"])
    for n in (9, LENGTH - 2):
        cache = cache_of(head)
        out = head.advance(head.fused(states[:, :n]), tokens[:, :n], positions_from(0, 0, n=n), cache)
        close(head.draft_logits(out), theirs[0][:, :n])
        for i, logits in enumerate(theirs[1:]):
            at = slice(n + i, n + i + 1)
            out = head.advance(out[:, -1:], tokens[:, at], positions_from(n + i, n + i, n=1), cache)
            close(head.draft_logits(out[:, 0]), logits[:, n - 1])


@pytest.mark.parametrize("options", [{"norm_before_fc": True}, {"layer_types": MIXED, "draft_vocab_size": 30}])
def test_p_eagle(tmp_path, monkeypatch, options):
    model, head = reference(tmp_path, "peagle", **options), load(tmp_path, "eagle")
    given, theirs, ends, n_draft = texts(head.shape.state_dim), [], ((7, 12), (18, 4)), 3
    masked = [LENGTH * row + at for pair in ends for row, at in enumerate(pair)]
    anchors = torch.tensor([*range(2 * LENGTH), *masked, *masked])
    depths = (torch.arange(len(anchors)) - 2 * LENGTH) // 4 + 1
    module = core("peagle")
    monkeypatch.setattr(module, "generate_cod_sample_indices", lambda **_: (anchors, depths.clamp(min=0)))
    monkeypatch.setattr(module, "compute_metrics", lambda **_: (None, {}))
    model.lm_head.register_forward_hook(lambda _, args, logits: theirs.append(logits[0]))
    model(**given)
    known, drafted = theirs[0][: 2 * LENGTH].view(2, LENGTH, -1), theirs[0][2 * LENGTH :].view(2, 2, 2, -1)

    states, tokens = in_rows(given["hidden_states"]), in_rows(given["input_ids"])
    assert head.shape.mask_token == MASK
    hidden, mask = head.fused(head.mask_hidden.expand(2, n_draft - 1, -1)), torch.full((2, n_draft - 1), MASK)
    for i, pair in enumerate(ends):
        cache = cache_of(head)
        out = head.advance(head.fused(states), tokens, positions_from(0, 0, n=LENGTH), cache)
        close(head.draft_logits(out), known)
        out = head.advance(hidden, mask, positions_from(*(at + 1 for at in pair), n=n_draft - 1), cache)
        close(head.draft_logits(out), drafted[:, i].transpose(0, 1))


DFLASHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("dflash", {"num_hidden_layers": 2, "attention_bias": True}),
    "causal windows": ("dflash", {"layer_types": SLIDING, "draft_vocab_size": 30}),
    "other windows": ("dflash", {"layer_types": SLIDING, "sliding_window_non_causal": True}),
    "mixed layers": ("dflash", {"layer_types": MIXED, "sample_from_anchor": True}),
    "DSpark": ("dspark", {"markov_rank": 6, "draft_vocab_size": 30}),
    "DSpark, gated": ("dspark", {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False}),
    "DSpark, recurrent": ("dspark", {"markov_rank": 6, "markov_head_type": "rnn", "layer_types": MIXED}),
    "DSpark, no bias": ("dspark", {"markov_rank": 0, "enable_confidence_head": False}),
    "DFlash 2": ("dflash2", {"selector_rank": 6, "selector_top_k": 5, "conv_group_size": 4, "num_hidden_layers": 2}),
    "DFlash 2, three taps": (
        "dflash2",
        {"selector_rank": 3, "selector_top_k": 7, "conv_kernel_size": 3, "conv_group_size": 8, "layer_types": MIXED},
    ),
}
ENDS = ((7, 12), (15, 3), (1, 6))  # for each draft, where the blocks of two texts begin


def chained(model: nn.Module, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logits of blocks after the tokens that the text has in the place of drafts."""
    before = tokens[..., 0]
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
    if getattr(model, "markov_head", None):
        return logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if hasattr(model, "candidate_selector"):
        ids, scores = model.candidate_selector.select(logits, hidden, before)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, scores)
    return logits


def compare_blocks(model: nn.Module, head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare blocks at several places of two texts. The cache has entries after the blocks, too."""
    target, given = tiny_model(DEEP), texts(head.shape.state_dim)
    model.embed_tokens.load_state_dict(target.tok_embeddings.state_dict())
    if head.shape.draft_vocab_size is None:
        model.lm_head.load_state_dict(target.output.state_dict())
    head.borrow(target)
    anchors = torch.tensor([LENGTH * row + at for pair in ENDS for row, at in enumerate(pair)])
    monkeypatch.setattr(core("dflash"), "select_anchors", lambda *_: (anchors, torch.ones_like(anchors)))
    hidden, theirs, _, _, indices = model._backbone_forward(**given, max_anchors=len(anchors))
    theirs = chained(
        model, *(x.view(len(anchors), BLOCK, -1) for x in (hidden, theirs, given["input_ids"][0, indices]))
    )
    states, tokens = in_rows(given["hidden_states"]), in_rows(given["input_ids"])
    for pair, logits in zip(ENDS, theirs.view(len(ENDS), 2, BLOCK, -1), strict=True):
        cache = cache_of(head)
        head.remember(head.fused(states), positions_from(0, 0, n=LENGTH), cache)
        current = tokens[torch.arange(2), torch.tensor(pair)]
        out = head.draft(current, positions_from(*pair, n=BLOCK), cache)
        known, memory = head.draft_logits(out), None
        assert out.shape[1] == head.shape.most_drafts
        for i in range(out.shape[1]):
            drafted = known[:, i]
            if head.chain:
                before = tokens[torch.arange(2), torch.tensor(pair) + i]
                drafted, memory = head.chain(drafted, out[:, i], before, memory)
            close(drafted, logits[:, i - out.shape[1]])


@pytest.mark.parametrize("name", DFLASHES)
def test_dflash(tmp_path, monkeypatch, name):
    kind, options = DFLASHES[name]
    model = reference(tmp_path, kind, **options, block_size=BLOCK, aux_hidden_state_layer_ids=[1, 2, 6])
    compare_blocks(model, load(tmp_path, "dflash"), monkeypatch)


def authors_mask(
    document_ids: Tensor,
    total_seq_len: int,
    anchor_positions: Tensor,
    block_size: int,
    sliding_window: int | None,
    **_: Any,
) -> tuple[Callable[..., Tensor], int, int]:
    """Return what the authors' layers see: with a window, the last tokens, itself included, and no later ones."""
    blocks = (anchor_positions[:, None] + torch.arange(block_size)).flatten()
    starts, seen = anchor_positions.repeat_interleave(block_size), torch.cat([torch.arange(total_seq_len), blocks])
    distance = blocks[:, None] - seen
    in_block = torch.cat([torch.full((total_seq_len,), -1), starts]) == starts[:, None]
    in_text = (seen < starts[:, None]) & (document_ids[seen] == document_ids[starts][:, None])
    in_text[:, total_seq_len:] = False
    visible = in_text | in_block
    if sliding_window:
        visible &= (distance >= 0) & (distance < sliding_window)
    return lambda b, h, q, kv: visible[q, kv], len(blocks), len(seen)


@pytest.mark.parametrize("types", [None, MIXED])
def test_dflash_of_its_authors(tmp_path, monkeypatch, types):
    """The authors' tensors in the layers of `speculators`, which has other windows."""
    ids, tensors = [1, 2, 6], heads.dflash_tensors(DEEP)
    windows = {"layer_types": types, "sliding_window": WINDOW, "use_sliding_window": bool(types)}
    config = heads.dflash_config(DEEP, target_layer_ids=[i - 1 for i in ids], block_size=BLOCK, **windows)
    heads.save_head(tmp_path / "authors", tensors, config)
    options = {"num_hidden_layers": 2, "layer_types": types, "block_size": BLOCK, "aux_hidden_state_layer_ids": ids}
    model = reference(tmp_path / "speculators", "dflash", **options)
    model.load_state_dict(tensors, strict=False)
    head = load(tmp_path / "authors", "dflash")
    assert head.shape.inputs_of == (1, 2, 6)
    monkeypatch.setattr(core("dflash"), "create_anchor_block_mask_mod", authors_mask)
    compare_blocks(model, head, monkeypatch)
