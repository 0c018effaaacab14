"""Teacher forcing: measures acceptance on a given text, which every round continues, whatever was accepted."""

from collections.abc import Sequence

import torch

from common.errors import refuse
from engine.batch import Batch
from engine.drafters import Drafter, RowUpdate
from engine.modes import GREEDY
from engine.requests import check_prompt
from engine.round import Round
from engine.runner import ModelRunner, not_finite
from engine.sampling.distribution import Filters, SamplingParams
from engine.stats import Counts


@torch.inference_mode()
def forced_acceptance(
    runner: ModelRunner,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[Counts]:
    """Count how many drafts the target accepts greedily after every (gamma + 1)-th token of a text that neither model
    wrote.

    A model that continues its output loops sooner or later, and a loop is easy to draft; a book does not loop. Row b
    begins with `prompts[b]`, and after each round the next gamma + 1 tokens of `continuations[b]` run in place of the
    round's output. Returns the counts of each row. Errors: ConfigError unless there is a prompt and a continuation per
    row, and all continuations have the same length, gamma + 2 or more.
    """
    gamma, n_rows, reads_current = drafter.gamma, runner.max_batch, drafter.reads_current
    n_token = min(map(len, continuations), default=0)
    shape = len(prompts), len(continuations), max(map(len, continuations), default=0)
    if shape != (n_rows, n_rows, n_token) or n_token < gamma + 2:
        seen = f"{shape[0]} prompts, {shape[1]} continuations of {n_token} to {shape[2]} tokens"
        required = f"{n_rows} of each, continuations of the same length, {gamma + 2} tokens or more"
        what, fix = "a prompt and a continuation are needed per row", "give as many prompts as rows, or longer texts"
        refuse("forced_acceptance()", seen, required, what, fix)
    for index, prompt in enumerate(prompts):
        check_prompt(runner, index, prompt, n_token, gamma)
    drafter.check(runner, max(map(len, prompts)) + n_token + gamma + 1)
    params = [SamplingParams()] * n_rows
    for row, prompt in enumerate(prompts):
        if (bad := runner.prefill(row, prompt).bad_position) is not None:
            raise not_finite(f"teacher forcing, row {row}", f"NaN or infinity at position {bad}")
        drafter.follow([RowUpdate(row, row, prompt, 0)])
    if reads_current:
        rows = enumerate(zip(prompts, continuations, strict=True))
        drafter.follow([RowUpdate(row, row, [*prompt, book[0]], len(prompt)) for row, (prompt, book) in rows])
    batch = Batch(n_rows, Filters.of(params), runner.device, n_ids=runner.vocab_size)
    batch.set_rows(params, range(n_rows))
    round_ = Round(runner, batch, drafter, gamma, GREEDY)
    books = torch.tensor(continuations, device=runner.device)
    texts = [[*prompt, *book] for prompt, book in zip(prompts, continuations, strict=True)]
    counts = [Counts.of_gamma(gamma) for _ in range(n_rows)]
    for start in range(0, n_token - gamma - 1, gamma + 1):
        known = [(text, len(prompt) + start) for text, prompt in zip(texts, prompts, strict=True)]
        last_two = [text[n - 1] for text, n in known], [text[n] for text, n in known]
        batch.set_state([n for _, n in known], *last_two)
        for count, outcome in zip(counts, round_.run(), strict=True):
            count.add_round(len(outcome.drafts), len(outcome.block) - 1, len(outcome.block))
        round_.roll_back()
        round_.forward(books[:, start : start + gamma + 1])
        # Written-through drafters have the block's entries already.
        n_written = gamma + 1 if drafter.is_written_through and reads_current else 0
        ends = [(text, n, n + gamma + 1) for text, n in known]
        updates = [
            RowUpdate(row, row, text[: end + reads_current], n + n_written, verified=range(n - start, end))
            for row, (text, n, end) in enumerate(ends)
        ]
        drafter.follow_verified(updates)
    runner.cache.rollback(torch.tensor([len(prompt) for prompt in prompts], device=runner.device))
    return counts
