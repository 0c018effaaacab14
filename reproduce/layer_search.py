"""Which layers a self-draft should skip: a greedy search by acceptance on the data set's own text, and what each pays.

    python reproduce/layer_search.py --B 8 --prefix_len 1000 --draft_budget 256

From all layers on, that one is dropped without which the draft is accepted most: sum(min(p, q)) of target and draft
behind the text's tokens, the probability that rejection sampling accepts (Leviathan et al. 2023, arXiv 2211.17192,
theorem 3.5). Costs measured here, of the most and the fewest layers and on the line between, make that a predicted
speedup. The first so many layers (an early exit) stand beside each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

import bench
import engine
from bench.auto.costs import tokens_per_round
from bench.auto.measure import measure_costs
from bench.auto.rehearsal import Rehearsal
from bench.config import Output, RunConfig, Sampling, Sizes, Target, Text
from bench.draft_flags import draft_flags
from common import cli
from common.errors import require_at_least
from common.jsonl import publish
from common.say import say
from common.tables import console
from engine.drafters import RowUpdate
from engine.drafters.self_speculation import SelfSpeculation
from engine.sampling import logits_to_probs
from models.llama import select_layers
from reproduce.paper.columns import of

SelfDraft: Any = draft_flags(["self"], without=("draft_layers",))
Layers = tuple[int, ...]


@dataclass(frozen=True)
class Flags:
    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(8, 1000, 48))
    sampling: Sampling = field(default_factory=Sampling)
    draft: SelfDraft = field(default_factory=SelfDraft)
    output: Output = field(default_factory=Output)
    fewest: int = 10  # layers at which the search ends


def main(flags: Flags) -> None:
    flags.target.with_text()
    own = {"sampling": flags.sampling, "output": flags.output, "draft": flags.draft.config()}
    plan = bench.resolve(RunConfig(flags.target, flags.text, flags.sizes, **own))
    for name, seen, least in (("gamma", plan.gamma, 1), ("fewest", flags.fewest, 1)):
        require_at_least(name, seen, least)
    require_at_least("gen_len", plan.gen_len, plan.gamma + 2)
    session = bench.Session.of_plan(plan, n_continued=plan.gen_len)
    runner, gamma, sampling, length = session.runner, plan.gamma, plan.sampling, plan.prefix_len
    bench.prefill(session)
    book = torch.tensor(session.continuations, device=runner.device)
    positions = torch.arange(length, length + book.shape[1], device=runner.device).expand_as(book)
    texts = [prompt + behind for prompt, behind in zip(session.prompts, session.continuations, strict=True)]
    with torch.inference_mode():
        targets = logits_to_probs(runner.step(book, positions), sampling.params)

    def draft(layers: Layers) -> tuple[engine.ModelRunner, SelfSpeculation]:
        model, how = select_layers(session.draft_model or runner.model, layers), session.draft
        cache = how.policy.new_cache(model.config, session.n_rows, session.capacity, runner.device, how.kv_dtype)
        return runner.over(cache, model), SelfSpeculation(runner, cache, gamma, model, layers)

    @torch.inference_mode()
    def acceptance(layers: Layers) -> float:
        """In blocks of gamma tokens, over what the draft's cache then has of the target's."""
        (own, drafter), starts = draft(layers), range(0, book.shape[1] - gamma + 1, gamma)
        shares = torch.zeros(len(starts))
        for place, start in enumerate(starts):
            drafter.follow([RowUpdate(row, row, text[: length + start], 0) for row, text in enumerate(texts)])
            block = slice(start, start + gamma)
            logits = own.step(book[:, block], positions[:, block])
            drafts = logits_to_probs(logits, sampling.params)
            shares[place] = torch.minimum(targets[:, block], drafts).sum(dim=-1).mean()
        return shares.mean().item()

    found = search(runner.model.config.n_layer, flags.fewest, acceptance)
    exits = [acceptance(tuple(range(len(layers)))) for layers, _ in found]
    drafters = [draft(layers)[1] for layers, _ in found]
    both = drafters[0], drafters[-1]
    most, least = measure_costs(Rehearsal(runner, both, session.prompts, gamma=gamma, **session.how), [gamma])
    per_layer = (most.draft_ms - least.draft_ms) / max(1, len(found) - 1)
    rows: list[dict[str, Any]] = []
    for dropped, ((layers, alpha), early) in enumerate(zip(found, exits, strict=True)):
        one = replace(most, draft_ms=most.draft_ms - dropped * per_layer)
        rows.append({"draft_layers": ",".join(map(str, layers)), "layers": len(layers), "expected_acceptance": alpha})
        pays, best = max((one.speedup(tokens_per_round(alpha, n), n), n) for n in range(1, gamma + 1))
        rows[-1] |= {"early_exit": early, "draft_ms": one.draft_ms, "predicted_speedup": pays, "gamma": best}
    winner = max(rows, key=itemgetter("predicted_speedup"))
    order = [({*more} - {*fewer}).pop() for (more, _), (fewer, _) in pairwise(found)]
    measured = {"order": order, "plain_ms": most.plain_ms, "best": winner["draft_layers"], "rows": rows}
    says = "pays best: --draft_layers {draft_layers} --gamma {gamma}, {predicted_speedup:.2f} predicted"
    line = bench.record_of("layer_search", session, bench.rounded(measured), {"draft_layers", "gamma"})
    publish(flags.output.output, line, console(rows, of("layers")), says.format(**winner))


def search(n_layer: int, fewest: int, score: Callable[[Layers], float]) -> list[tuple[Layers, float]]:
    """Layers and their scores, one layer fewer each time: the one without which the others score best."""
    layers = tuple(range(n_layer))
    found = [(layers, score(layers))]
    while len(layers) > fewest:
        fewer = [layers[:place] + layers[place + 1 :] for place in range(len(layers))]
        layers, best = max(((one, score(one)) for one in fewer), key=itemgetter(1))
        found.append((layers, best))
        say(f"{len(layers)} layers: {best:.3f} without {sorted({*range(n_layer)} - {*layers})}")
    return found


if __name__ == "__main__":
    cli.run_alone(main, Flags)
