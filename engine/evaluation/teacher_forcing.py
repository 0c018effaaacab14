"""Acceptance on a given text: whatever is accepted, every round goes on from the text's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from common.errors import ConfigError, UserError
from engine.drafters import Drafter
from engine.modes import Rows, resolve_mode, start_round
from engine.requests import check_prompt
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.stats import Counts
from engine.verification import Verdict


@torch.inference_mode()
def forced_acceptance(
    runner: ModelRunner,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    sampling: SamplingParams | None = None,
    verification: str = "auto",
) -> list[Counts]:
    """How many drafts the target accepts in every (gamma + 1)-th place of a text that neither model wrote.

    A model that is left to itself loops sooner or later, and a loop is easy to draft; a book does not. Row b
    begins with `prompts[b]`, and after each round the next gamma + 1 tokens of `continuations[b]` are run in place
    of what the round emitted. One prompt for each of the runner's rows, and continuations of the same length.

    Returns: what each row's rounds drafted, judged and accepted.
    Errors: ConfigError for another number of prompts, or continuations that are not one length, or too short.
    """
    gamma, n_rows = drafter.gamma, runner.max_batch
    lengths_given = {len(continuation) for continuation in continuations}
    n_token = min(lengths_given, default=0)
    if len(prompts) != n_rows or len(continuations) != n_rows or len(lengths_given) != 1 or n_token < gamma + 2:
        raise ConfigError(
            "teacher forcing takes a prompt and a continuation for each row",
            where="forced_acceptance: prompts, continuations",
            seen=f"{len(prompts)} prompts, {len(continuations)} continuations of {sorted(lengths_given)} tokens",
            required=f"{n_rows} of each, the continuations all of one length, gamma + 2 = {gamma + 2} tokens or more",
            fix="give one prompt and one continuation per row, and more text or a smaller gamma",
        )
    for index, prompt in enumerate(prompts):
        check_prompt(runner, index, prompt, n_token, gamma)
    drafter.check(runner, max(map(len, prompts)) + n_token + gamma + 1)
    params = [sampling or SamplingParams()] * n_rows
    mode = resolve_mode(verification, params)
    rows = Rows.of(params, range(n_rows), runner.device, source=runner.noise_source)
    for row, prompt in enumerate(prompts):
        if (bad := runner.prefill_row(row, prompt).bad_position) is not None:
            raise UserError(
                "the model's logits are not finite",
                where=f"teacher forcing, row {row}",
                seen=f"NaN or infinity at position {bad}",
                required="finite logits",
                fix="check the checkpoint (convert again), or use a wider --dtype (float32)",
            )
        drafter.admit(row, row, prompt)
    text = torch.tensor(continuations, device=runner.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=runner.device)
    through = drafter.verification_cache
    ahead = torch.arange(gamma + 1, device=runner.device)
    counts = [Counts.of_gamma(gamma) for _ in range(n_rows)]
    for start in range(0, n_token - gamma - 1, gamma + 1):
        current, extent = text[:, start], int(lengths.max()) + gamma + 1
        verification_round = start_round(mode, rows, lengths, gamma, runner.model)
        positions = lengths[:, None] + ahead
        drafts = drafter.propose(current, lengths, extent, verification_round, gamma)
        logits = runner.step(torch.cat([current[:, None], drafts.tokens], dim=1), positions, extent, through)
        verdict = partial(verification_round.judge, drafts, logits)

        def n_accepted(judge: Callable[[], Verdict] = verdict) -> Tensor:
            return judge().num_accepted

        accepted = runner.ranks.decided(n_accepted, n_rows).tolist()
        drafted = [gamma] * n_rows if drafts.lengths is None else drafts.lengths.tolist()
        for count, n_drafted, n in zip(counts, drafted, accepted, strict=True):
            count.add_round(n_drafted, n, n + 1)
        for part in (runner, drafter):
            part.rollback(lengths)
        runner.step(text[:, start : start + gamma + 1], positions, extent, through)
        known, lengths = lengths, lengths + gamma + 1
        if through is None or through is runner.cache:  # else the step above wrote to the draft's cache as well
            for row, prompt in enumerate(prompts):
                committed = [*prompt, *continuations[row][: start + gamma + 1]]
                drafter.resume(row, committed, int(known[row]))
    runner.rollback(torch.tensor([len(prompt) for prompt in prompts], device=runner.device))
    return counts
