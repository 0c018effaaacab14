"""Speculative decoding on one screen: one row and no cache, with p of the target and q of the draft as in the papers.

`engine.decoding` decodes batches of rows over caches, and tests compare the two token for token. Each round drafts
x_1 .. x_gamma from q, accepts the first few of them, and adds a token of the target:

- "greedy": accept x_i while it is the argmax of p, then add that argmax;
- "rejection": accept x_i with probability min(1, p(x_i) / q(x_i)); add a draw from norm(max(p - q, 0)) after a
  rejection, else from p (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1): every token is distributed as p;
- "coupled": draft and target draw by the same noise g per position, argmax(log q + g) and argmax(log p + g); accept x_i
  while it is the target's draw, then add that draw (Daliri et al. 2024, arXiv 2408.07978): tokens depend on p alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampling.distribution import Distribution, SamplingParams
from engine.sampling.noise import Stream, gumbel, uniform

# The logits `[V]` of the token that follows a text.
NextLogits = Callable[[list[int]], Tensor]


def decode(
    target: NextLogits,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: SamplingParams,
    mode: str,
    request: int = 0,
    draft: NextLogits | None = None,
    gamma: int = 0,
) -> list[int]:
    """Return the `n_tokens` after `prompt`; without a draft, those of plain decoding. request: keys the noise, next to
    the seed."""
    text = [*prompt]
    while len(text) < len(prompt) + n_tokens:
        # The first token comes from the prompt's prefill: a round without drafts.
        n_drafts = gamma if draft is not None and len(text) > len(prompt) else 0
        text += decode_round(target, draft or target, text, n_drafts, sampling, mode, request)
    return text[len(prompt) : len(prompt) + n_tokens]


def decode_round(
    target: NextLogits, draft: NextLogits, text: list[int], gamma: int, sampling: SamplingParams, mode: str, id_: int
) -> list[int]:
    """Return the tokens that one round appends to `text`: accepted drafts, and one of the target."""
    law, keys = Distribution.of([sampling]), (torch.tensor(sampling.seed), torch.tensor(id_))

    def draw(log_probs: Tensor, position: int, stream: int) -> int:
        noise = gumbel(*keys, torch.tensor(position), stream, len(log_probs), log_probs.dtype)
        return int((log_probs + noise).argmax())

    def choose(logits: Tensor, position: int) -> int:
        """Return the draw of the greedy or the coupled mode."""
        log_probs = law.logprobs(logits[None])[0]
        return int(log_probs.argmax()) if mode == "greedy" else draw(log_probs, position, Stream.COUPLED)

    # Draft x_1 .. x_gamma from q.
    x: list[int] = []
    q: list[Tensor] = []
    for i in range(gamma):
        logits, position, stream = draft(text + x), len(text) + i, Stream.DRAFT + len(Stream) * i
        q.append(law.probs(logits[None])[0])
        x.append(draw(q[i].log(), position, stream) if mode == "rejection" else choose(logits, position))

    # Verify them by p after 0 .. gamma drafts: one forward in the engine.
    verified = [target(text + x[:i]) for i in range(gamma + 1)]
    if mode != "rejection":
        choices = [choose(logits, len(text) + i) for i, logits in enumerate(verified)]
        n_accepted = next((i for i in range(gamma) if x[i] != choices[i]), gamma)
        return [*x[:n_accepted], choices[n_accepted]]
    p = [law.probs(logits[None])[0] for logits in verified]
    u = [uniform(*keys, torch.tensor(len(text) + i), Stream.ACCEPT) for i in range(gamma)]
    n = next((i for i in range(gamma) if not u[i] * q[i][x[i]].double() < p[i][x[i]].double()), gamma)
    residual = (p[n] - q[n]).clamp(min=0) if n < gamma else p[n]
    if residual.sum() == 0:  # by rounding only
        residual = p[n]
    return [*x[:n], draw(residual.log(), len(text), Stream.RESAMPLE)]
