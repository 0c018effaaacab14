"""Train an EAGLE-3 head and Medusa heads on stored examples, from the checkpoint of an earlier run if it exists."""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from common.jsonl import append_record, read_lines
from common.say import say
from kv_cache.entries import KV, Store, store
from kv_cache.views import NoCache
from models import Transformer
from models.attention import AttentionSpec, TorchAttention
from models.attention.base import AnySlots
from models.checkpoints.manifest import CONFIG, atomic_path, write_text
from models.heads.eagle import EagleHead, EagleShape
from models.heads.loading import published
from models.heads.medusa import MedusaHeads, MedusaShape
from models.packed_linear import can_pack
from reproduce.heads.examples import Examples, batch_of

# Factor from the weight of a draft position's loss to that of the next position; largest norm of a head's gradient.
DECAY, CLIP = 0.8, 1.0
# Steps in which the learning rate rises, and seconds between checkpoints.
WARM_UP, SAVE_SECONDS = 20, 60.0
CHECKPOINT, CURVE = "training.pt", "curve.jsonl"


@dataclass(frozen=True)
class Recipe:
    """How heads are trained."""

    steps: int = 2000  # at most; the learning rate falls as a cosine until the last step, or until the time is over
    window: int = 256  # tokens of a training window
    windows: int = 4  # windows of a step
    lr: float = 2e-3  # largest learning rate of AdamW
    depth: int = 3  # draft positions: Medusa heads, and steps of the EAGLE head from its own states
    draft_vocab_size: int = 4096  # the most frequent tokens, which alone the EAGLE head drafts


def inputs_of(n_layer: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads, those of its published code; fewer for a target of few layers."""
    return tuple(sorted({min(2, n_layer), n_layer // 2, max(0, n_layer - 3)}))


def new_heads(target: Transformer, known: Tensor, depth: int) -> nn.ModuleDict:
    """Return the heads `eagle`, which drafts the tokens `known [n]`, ascending, and `medusa`, in float32. EAGLE begins
    with the weights of the target's last layer over the last of its inputs, Medusa with those of the output layer."""
    config, last_layer = target.config, target.layers[-1]
    one_layer = replace(config, n_layer=1, tie_embeddings=False, unrotated_layers=(), qk_norm=False)
    one_layer = replace(one_layer, qkv_bias=False, wo_bias=False, mlp_bias=False)
    shape = EagleShape(one_layer, config.dim, len(known), inputs_of(config.n_layer), has_embedding=False)
    eagle, medusa = EagleHead(shape), MedusaHeads(MedusaShape(depth, 1, config.dim, config.vocab_size, False))
    eagle.target_ids = known
    with torch.no_grad():
        first, eye = eagle.body.layers[0], torch.eye(config.dim)
        eagle.fc.weight.copy_(torch.cat([0 * eye] * (len(shape.inputs_of) - 1) + [eye], dim=1))
        first.attention.wqkv.weight.copy_(torch.cat([plain(last_layer.attention.wqkv)] * 2, dim=1) / 2)
        for name in ("attention_norm", "attention.wo", "ffn_norm", "feed_forward.w13", "feed_forward.w2"):
            first.get_submodule(name).weight.copy_(plain(last_layer.get_submodule(name)))
        first.hidden_norm.weight.copy_(last_layer.attention_norm.weight)
        eagle.body.norm.weight.copy_(target.norm.weight)
        eagle.body.output.weight.copy_(output_rows(target, known))
        for parameter in medusa.parameters():
            parameter.zero_()
    eagle.borrow(target)
    return nn.ModuleDict({"eagle": eagle, "medusa": medusa}).to(known.device)


def plain(layer: nn.Module) -> Tensor:
    """Return the dense weight of a linear layer, which may be packed."""
    return layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight


def output_rows(target: Transformer, ids: Tensor) -> Tensor:
    """Return rows of the target's output layer, `[n, dim]` float32."""
    tied = target.config.tie_embeddings or target.output is None
    return plain(target.tok_embeddings if tied else target.output)[ids].float()


class Unrolled(NoCache, TorchAttention):
    """Cache and attention of a one-layer head that is run from its own states, step by step. Row i of the first step
    sees rows 0 to i. In later steps it also sees its entries of the steps before, like in drafting (training-time test,
    EAGLE-3, arXiv 2503.01840, section 3.2)."""

    in_order = block_ends_view = False

    def __init__(self, positions: Tensor) -> None:
        super().__init__(positions)
        self._written: list[Tensor] = []

    def write(self, layer: int, slots: None, new: Tensor, store: Store = store) -> None:
        self._written.append(new)

    def read(self, layer: int, queries: Tensor) -> KV:
        return KV(*torch.cat(self._written, dim=1).unbind(2))

    def prepare(self, spec: AttentionSpec, queries: Tensor, slots: AnySlots) -> Tensor:
        n = queries.shape[1]
        diagonal = torch.eye(n, dtype=torch.bool, device=queries.device)
        visible = torch.cat([torch.ones_like(diagonal).tril(), *[diagonal] * len(self._written)], dim=1)
        return torch.zeros_like(visible, dtype=spec.dtype).masked_fill(~visible, -torch.inf)[None, None]


def unrolled_losses(
    eagle: EagleHead, medusa: MedusaHeads, known_rows: Tensor, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the losses of both heads at each draft position, `[2, depth]`, EAGLE's first, and in the same shape the
    mean of sum(min(p, q)). A loss is the cross entropy to the target's distribution p over the tokens that
    can be drafted.

    known_rows: the target's output layer for those tokens, `[n, dim]`. batch: Examples with states in float32. The i-th
    draft behind position t follows the token at t + 1 + i, so p is made of the target's state there."""
    depth, length = len(medusa), batch["tokens"].shape[1] - len(medusa)
    targets = F.linear(batch["last"], known_rows).softmax(dim=-1)
    states, last = eagle.fused(batch["inputs"][:, :length]), batch["last"][:, :length]
    positions = torch.arange(length, device=last.device).expand(last.shape[:2])
    eagle.body.backend = unrolled = Unrolled(positions)
    losses, shared = [], []
    for i in range(depth):
        ahead = slice(1 + i, 1 + i + length)
        states = eagle.advance(states, batch["tokens"][:, ahead], positions + i, unrolled)
        for logits in (eagle.draft_logits(states), F.linear(medusa[i](last), known_rows)):
            target = targets[:, ahead]
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1)))
            shared.append(torch.minimum(logits.detach().softmax(dim=-1), target).sum(dim=-1).mean())
    return tuple(torch.stack(each).view(depth, 2).T for each in (losses, shared))


def train(
    heads: nn.ModuleDict,
    known_rows: Tensor,
    windows: Sequence[Examples],
    recipe: Recipe,
    folder: Path,
    share_of_time: Callable[[float], float],
) -> float:
    """Train until the steps or the time are over, and return the seconds of training, earlier runs included.

    share_of_time: gives the share of the time that is over from the seconds of training. The curve in the folder has
    the losses and the shared probability of each head and position. A run from a checkpoint gives the weights of an
    uninterrupted run, if time suffices, since a step's windows follow from its number."""
    optimizer = torch.optim.AdamW(heads.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    done, before, device = 0, 0.0, known_rows.device
    if (folder / CHECKPOINT).exists():
        saved = torch.load(folder / CHECKPOINT, map_location=device, weights_only=True)
        heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        done, before = saved["step"], saved["seconds"]
        say(f"continuing after step {done}")
    in_bfloat16 = device.type == "cuda" or can_pack(device, torch.bfloat16)
    weights = DECAY ** torch.arange(recipe.depth, device=device)
    started = last_saved = perf_counter()

    def seconds() -> float:
        return before + perf_counter() - started

    def save(step: int) -> None:
        state = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds()}
        with atomic_path(folder / CHECKPOINT) as partial:
            torch.save(state, partial)

    for step in range(done, recipe.steps):
        progress = max(step / recipe.steps, share_of_time(seconds()))
        if step and progress >= 1:  # a curve needs a step
            break
        batch = {name: x.to(device) for name, x in batch_of(windows, recipe.windows, step).items()}
        batch |= {name: batch[name].float() for name in ("last", "inputs")}
        # Ignores the warning that norms in mixed dtypes have no fused kernel.
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16)
        with autocast, warnings.catch_warnings(action="ignore", category=UserWarning):
            losses, shared = unrolled_losses(heads["eagle"], heads["medusa"], known_rows, batch)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2
        optimizer.zero_grad()
        (losses * weights).sum().backward()
        for head in heads.values():
            torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        optimizer.step()
        done = step + 1
        line = {"step": done, "seconds": round(seconds(), 1)}
        for head, loss, share in zip(heads, losses.tolist(), shared.tolist(), strict=True):
            line |= {f"{head}_loss": loss, f"{head}_shared": share}
        append_record(str(folder / CURVE), line)
        if done % 10 == 0:
            shares = ", ".join(f"{head} {share:.3f}" for head, share in zip(heads, shared[:, 0].tolist(), strict=True))
            say(f"step {done}, {progress:.0%} of the time or the steps; shared probability at position 0: {shares}")
        if perf_counter() - last_saved > SAVE_SECONDS:
            save(done)
            last_saved = perf_counter()
    save(done)
    return seconds()


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of every step in the folder's curve."""
    curve = {line["step"]: line for _, line in read_lines(folder / CURVE)}
    return [curve[step] for step in sorted(curve)]


def save_heads(heads: nn.ModuleDict, folder: Path, target: Mapping[str, Any]) -> None:
    """Write heads in their published formats, each in a folder. target: the values of the target's config.json."""
    single = {"num_hidden_layers": 1, "tie_word_embeddings": False, "eos_token_id": None}
    shape = heads["eagle"].shape
    eagle = {
        **target,
        **single,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": shape.draft_vocab_size,
    }
    eagle["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": shape.inputs_of}
    medusa = {"medusa_num_heads": len(heads["medusa"]), "medusa_num_layers": heads["medusa"].shape.n_layer}
    for name, file, config in (("eagle", "model", eagle), ("medusa", "medusa_lm_head", medusa)):
        renamed = ((part.replace("layers.0.", "midlayer."), x) for part, x in published(heads[name]).items())
        tensors = {part: x.detach().cpu().contiguous() for part, x in renamed}
        with atomic_path(folder / name / f"{file}.safetensors") as partial:
            save_file(tensors, partial)
        write_text(folder / name / CONFIG, json.dumps(config, indent=2) + "\n")
