"""Train an EAGLE-3.1 or a DFlash head on stored examples, from the checkpoint of an earlier run if it exists."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from common.say import say
from models import ModelConfig, Transformer
from models.checkpoints.manifest import CONFIG, atomic_path, write_text
from models.heads.dflash import DFlashHead, DFlashShape
from models.heads.eagle import EagleHead, EagleShape
from models.heads.loading import published
from reproduce.heads.examples import Examples, Window, chosen, inputs_of, stacked, token_counts, windows_of
from reproduce.heads.forwards import dflash_logits, eagle_logits

TrainedHead: TypeAlias = EagleHead | DFlashHead
# Factor from the weight of a draft position's loss to that of the next position; largest norm of a head's gradient.
DECAY, CLIP = 0.8, 1.0
# Steps in which the learning rate rises, and seconds between checkpoints.
WARM_UP, SAVE_SECONDS = 20, 60.0
# Held-out windows that are measured with every checkpoint, with the blocks of this step, which are long.
MEASURED, MEASURED_STEP = 8, 2
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """How heads are trained."""

    steps: int = 20_000  # at most; the learning rate falls as a cosine until the last step, or until the time is over
    window: int = 512  # tokens of a training window, after the row's first 4 tokens
    windows: int = 2  # windows of a step
    lr: float = 3e-3  # largest learning rate of AdamW
    depth: int = 3  # draft positions of the EAGLE head, each from the state that it predicted before
    draft_vocab_size: int = 6144  # the most frequent tokens, which alone the heads draft
    layers: int = 3  # layers of the DFlash head
    block_size: int = 8  # tokens of the DFlash head's longest blocks; two of three steps halve them, like small gammas
    blocks: int = 64  # of a window


def head_config(target: ModelConfig, n_layer: int, qk_norm: bool) -> ModelConfig:
    """Return the layers of a head: as the target's, but as plain as published heads are."""
    plain = {"unrotated_layers": (), "qkv_bias": False, "wo_bias": False, "mlp_bias": False, "tie_embeddings": False}
    return replace(target, n_layer=n_layer, qk_norm=qk_norm, **plain)


def new_head(kind: str, target: Transformer, counts: Tensor, recipe: Recipe, sample: Tensor) -> TrainedHead:
    """Return an untrained `eagle` or `dflash` head in float32, which begins as the target's last layers, over the last
    of its inputs.

    target: in float32, its linear layers not packed. counts: of the target's tokens in the examples, of which the head
    drafts the most frequent ones. sample: states of some tokens, `[N, k * dim]`, whose sizes norms begin with."""
    config, device = target.config, target.norm.weight.device
    known = counts.sort(descending=True, stable=True).indices
    # A DFlash head that drafted every token would be read with the target's output layer.
    ids = known[: min(recipe.draft_vocab_size, len(known) - 1)].sort().values
    sizes = {"draft_vocab_size": len(ids), "inputs_of": inputs_of(config.n_layer), "has_embedding": False}
    head: TrainedHead
    if kind == "eagle":
        shape = EagleShape(head_config(config, 1, False), config.dim, **sizes, fc_norm=True, norm_output=True)
        head = EagleHead(shape)
    else:
        layers = head_config(config, min(recipe.layers, config.n_layer), True)
        mask = {"mask_token": int(known[-1]), "block_size": recipe.block_size, "drafts_anchor": True}
        head = DFlashHead(DFlashShape(layers, config.dim, **sizes, **mask))
    with torch.no_grad():
        n_input = len(sizes["inputs_of"])
        head.fc.weight.copy_(torch.eye(config.dim).repeat(1, n_input))
        head.fc.weight[:, : (n_input - 1) * config.dim] = 0
        last = sample.to(device).float()[:, -config.dim :]
        begin = _begin_eagle if isinstance(head, EagleHead) else _begin_dflash
        begin(head, target, last)
        head.body.norm.weight.copy_(target.norm.weight)
        head.body.output.weight.copy_(output_rows(target, ids))
    head.target_ids = ids
    head.borrow(target)
    return head.to(device)


def _begin_eagle(eagle: EagleHead, target: Transformer, last: Tensor) -> None:
    """Copy the target's last layer to a head. Its stream is normalised, so what the layer adds shrinks like it."""
    layer, from_layer = eagle.body.layers[0], target.layers[-1]
    _copy(layer, from_layer, "attention_norm", "ffn_norm", "feed_forward.w13")
    layer.hidden_norm.weight.copy_(from_layer.attention_norm.weight)
    layer.attention.wqkv.weight.copy_(from_layer.attention.wqkv.weight.repeat(1, 2) / 2)
    for name in ("attention.wo", "feed_forward.w2"):
        layer.get_submodule(name).weight.copy_(from_layer.get_submodule(name).weight / _size(last).mean())


def _begin_dflash(dflash: DFlashHead, target: Transformer, last: Tensor) -> None:
    """Copy the target's last layers to a head. Their queries and keys of the text keep their mean sizes; norms of
    attention move into the projections, which text and block share."""
    layers = dflash.body.layers
    for layer, from_layer in zip(layers, target.layers[-len(layers) :], strict=True):
        _copy(layer, from_layer, "attention.wo", "ffn_norm", "feed_forward.w13", "feed_forward.w2")
        wqkv = from_layer.attention.wqkv.weight * from_layer.attention_norm.weight
        layer.attention.wqkv.weight.copy_(wqkv)
        heads = F.linear(F.rms_norm(last, last.shape[-1:]), wqkv).unflatten(1, (-1, target.config.head_dim))
        n_head, n_kv_head = target.config.n_head, target.config.n_kv_head
        sizes = [_size(part).mean() for part in heads.split([n_head, n_kv_head, n_kv_head], dim=1)[:2]]
        layer.attention.qk_norm.weight.copy_(torch.stack(sizes).repeat_interleave(target.config.head_dim))


def _copy(layer: torch.nn.Module, source: torch.nn.Module, *names: str) -> None:
    for name in names:
        layer.get_submodule(name).weight.copy_(source.get_submodule(name).weight)


def _size(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1).sqrt()


def output_rows(target: Transformer, ids: Tensor) -> Tensor:
    """Return rows of the target's output layer, `[n, dim]`."""
    return (target.tok_embeddings if target.output is None else target.output).weight[ids].detach()


def losses(
    head: TrainedHead, known_rows: Tensor, batch: Examples, recipe: Recipe, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss at each draft position, `[n]`: the cross entropy to the target's distribution p over the tokens
    that can be drafted; and the logits and p, `[n, N, draft_vocab_size]`. A step's blocks follow from its number.

    known_rows: the target's output layer for those tokens. batch: of `examples.stacked`."""
    batch = batch | {name: batch[name].float() for name in ("last", "inputs")}
    if isinstance(head, EagleHead):
        logits, state_of = eagle_logits(head, batch, recipe.depth)
    else:
        size = recipe.block_size if step % 3 == 2 else max(2, recipe.block_size // 2)
        logits, state_of = dflash_logits(head, batch, size, recipe.blocks, seed=step)
    with torch.no_grad():
        law = F.linear(batch["last"].flatten(0, 1), known_rows).float().softmax(dim=-1)[state_of]
    each = [F.cross_entropy(x.float(), p) for x, p in zip(logits, law, strict=True)]
    return torch.stack(each), logits, law


def shared(logits: Tensor, law: Tensor) -> list[float]:
    """Return the mean of sum(min(p, q)) at each draft position: how often a draft is accepted if the target emits no
    other tokens than those that can be drafted."""
    q = logits.detach().float().softmax(dim=-1)
    return [round(x, 4) for x in torch.minimum(q, law).sum(dim=-1).mean(dim=-1).tolist()]


def train(
    kind: str, target: Transformer, folder: Path, n_batches: int, recipe: Recipe, limit: float
) -> tuple[TrainedHead, dict[str, Any]]:
    """Train an `eagle` or `dflash` head on the folder's first `n_batches` until the steps, or `limit` seconds of
    training, are over. Returns it with what a record says of it, such as the seconds and the curve, earlier runs
    included: the losses at every checkpoint, and the shared probability there and in held-out windows.

    Windows are stretches from anywhere in the rows at their absolute positions, after the row's first tokens: a head
    is trained as a streaming cache of that many entries lets it draft. A run from a checkpoint gives the weights of an
    uninterrupted run, if time suffices, since a step's windows and blocks follow from its number."""
    windows, held_out = windows_of(folder, recipe.window, n_batches)
    counts = token_counts(folder, target.config.vocab_size, n_batches)
    torch.manual_seed(0)
    head = new_head(kind, target, counts, recipe, windows[0][0]["inputs"][0])
    known_rows, checkpoint = output_rows(target, head.target_ids), folder / kind / CHECKPOINT
    device = known_rows.device
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    done, before, curve = 0, 0.0, list[dict[str, Any]]()
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        done, before, curve = saved["step"], saved["seconds"], saved["curve"]
        say(f"continuing after step {done}")
    in_bfloat16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    started = last_saved = perf_counter()

    def seconds() -> float:
        return before + perf_counter() - started

    def run(some: Sequence[Window], step: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = {name: x.to(device) for name, x in stacked(some, recipe.window).items()}
        # Ignores the warning that norms in mixed dtypes have no fused kernel.
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16)
        with autocast, warnings.catch_warnings(action="ignore", category=UserWarning):
            return losses(head, known_rows, batch, recipe, step)

    def progress() -> float:
        return max(done / recipe.steps, seconds() / limit)

    first, is_over = done, done > 0 and progress() >= 1  # a curve needs a step
    while not is_over:
        rate = recipe.lr * min(1, (done + 1) / WARM_UP) * (1 + math.cos(math.pi * progress())) / 2
        loss, logits, law = run(chosen(windows, recipe.windows, done), done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        (loss * DECAY ** torch.arange(len(loss), device=device)).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        optimizer.step()
        done += 1
        is_over = progress() >= 1
        if is_over or done == first + 1 or perf_counter() - last_saved > SAVE_SECONDS:
            line = {"step": done, "seconds": round(seconds(), 1), "loss": loss.tolist(), "shared": shared(logits, law)}
            with torch.no_grad():
                held_out_shared = shared(*run(held_out[:: -(-len(held_out) // MEASURED)], MEASURED_STEP)[1:])
            curve.append(line | {"held_out": held_out_shared})
            over = f"step {done}, {progress():.0%} of the time or the steps"
            say(f"{over}; shared probability in text that was held out: {held_out_shared}")
            state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
            with atomic_path(checkpoint) as partial:
                torch.save(state | {"step": done, "seconds": seconds()}, partial)
            last_saved = perf_counter()
    sizes = {"batches": n_batches, "example_tokens": int(counts.sum()), "examples": len(windows)}
    sizes |= {"held_out_examples": len(held_out), "steps": done, "training_seconds": seconds()}
    return head, {"recipe": vars(recipe), **sizes, "curve": curve}


def save_head(head: TrainedHead, folder: Path, target: Mapping[str, Any]) -> None:
    """Write a head as its authors (EAGLE-3) or `speculators` (DFlash) publish them. target: the values of the target's
    config.json."""
    shape, tensors = head.shape, published(head)
    layers = {**target, "num_hidden_layers": shape.config.n_layer, "tie_word_embeddings": False, "eos_token_id": None}
    # Written out, since a family's default may differ from the target's.
    layers |= {"head_dim": shape.config.head_dim, "num_key_value_heads": shape.config.n_kv_head}
    layers["rms_norm_eps"] = shape.config.norm_eps
    config: dict[str, Any]
    if isinstance(head, EagleHead):
        tensors = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
        config = {**layers, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": shape.inputs_of}
    else:
        config = {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}
        layers |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}  # whatever the target has
        config["transformer_layer_config"] = {**layers, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        config |= {"aux_hidden_state_layer_ids": shape.inputs_of, "mask_token_id": shape.mask_token}
        config |= {"block_size": head.shape.block_size, "sample_from_anchor": True}
    config["draft_vocab_size"] = shape.draft_vocab_size
    with atomic_path(folder / "model.safetensors") as partial:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, partial)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
