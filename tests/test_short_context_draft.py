"""A draft with a short trained context behind a long prompt: positions inside its cache keep it useful."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from witness import FakeConfig, FakeModel

from engine import ModelRunner, StandaloneDraft, generate
from engine.decoding import GenerateOutput
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.views import NoCache
from models import ModelConfig, Transformer

# A text opens with the id of its rule, then come words; the rule says which word follows which. Rotary attention
# knows only distances, and those inside the window are short wherever it stands: what a long text takes out of a
# draft's reach is what the sinks hold.
N_RULE, N_WORD = 6, 18
TRAINED = 128
SHAPE = {"n_layer": 2, "dim": 64, "n_head": 4, "n_kv_head": 4, "head_dim": 16, "ffn_dim": 128}
# A theta of 10,000 at 2,048 tokens (Llama), so that the slowest pair turns as far within the trained context.
DRAFT = ModelConfig(vocab_size=N_RULE + N_WORD, max_context=TRAINED, rope_theta=625.0, **SHAPE)
LONG = [1990, 2003, 2017, 1999, 2010, 2024]
N_NEW = 40


def make_rules() -> Tensor:
    """`[N_RULE, N_WORD]` ids: the successor of each word. Every rule is one cycle through all words."""
    generator = torch.Generator().manual_seed(0)
    cycles = torch.stack([torch.randperm(N_WORD, generator=generator) for _ in range(N_RULE)])
    return torch.empty_like(cycles).scatter_(1, cycles, cycles.roll(-1, dims=1)) + N_RULE


RULES = make_rules()


def following(rules: Tensor, tokens: Tensor) -> Tensor:
    """The id that the rules have behind each token; a rule's id counts as the first word."""
    return RULES[rules, (tokens - N_RULE).clamp(min=0)]


def texts(rules: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Random words `[B, length]` behind the rules `[B]`: they tell nothing of the rule, only the opening does."""
    words = N_RULE + torch.randint(N_WORD, (len(rules), length - 1), generator=generator)
    return torch.cat([rules[:, None], words], dim=1)


@pytest.fixture(scope="module")
def draft() -> Transformer:
    """Trained to name the successor of every word, at positions 0 to 127 under full attention."""
    batch, n_step, peak = 16, 180, 5e-3
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Transformer(DRAFT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98))
    positions = torch.arange(TRAINED).expand(batch, -1)
    for step in range(n_step):
        optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 20) * (1 - step / n_step)
        rules = torch.randint(N_RULE, (batch,), generator=generator)
        tokens = texts(rules, TRAINED, generator)
        logits = model(tokens, positions, NoCache(positions))[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), following(rules[:, None], tokens[:, 1:]).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05, f"the draft did not learn its task: loss {loss:.3f}"
    return model.eval().requires_grad_(False)


class Target(FakeModel):
    """Always right: a text's rule is the first token."""

    config = FakeConfig(DRAFT.vocab_size)

    def hidden(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        return following(self.look(tokens, positions, cache)[0][:, 0, :1], tokens)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.one_hot(hidden[..., 0], self.config.vocab_size).float()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """One prompt per length, each under a rule of its own."""
    generator = torch.Generator().manual_seed(2)
    return [texts(torch.tensor([rule]), n, generator)[0].tolist() for rule, n in enumerate(lengths)]


def decode(prompts: list[list[int]], draft: Transformer | None = None, **cache_settings) -> GenerateOutput:
    target = ModelRunner(Target(), FullKVCache(Target.config, len(prompts), 2100, dtype=torch.int64))
    drafter = None
    if draft:
        cache = StreamingKVCache(DRAFT, len(prompts), n_sink=4, **cache_settings)
        drafter = StandaloneDraft(ModelRunner(draft, cache), gamma=3)
    return generate(target, prompts, max_new_tokens=N_NEW, drafter=drafter)


def expected(prompt: list[int]) -> list[int]:
    """The text's continuation, from its rule alone."""
    words = [prompt[-1]]
    for _ in range(N_NEW):
        words.append(int(RULES[prompt[0], words[-1] - N_RULE]))
    return words[1:]


@pytest.mark.parametrize("budget", [64, 96])
def test_a_short_context_draft_follows_a_long_text_by_positions_inside_its_cache(draft, budget):
    prompts = prompts_of(LONG)
    in_cache = decode(prompts, draft, budget=budget, rotate_on_read=True)
    absolute = decode(prompts, draft, budget=budget, rotate_on_read=False)
    # What a draft is worth never shows in the tokens.
    assert in_cache.tokens == absolute.tokens == decode(prompts).tokens == [expected(prompt) for prompt in prompts]
    rates = [out.stats.counts.acceptance_rate for out in (in_cache, absolute)]
    assert rates[0] > 0.95 and rates[1] < 0.6
    assert in_cache.stats.counts.rounds < absolute.stats.counts.rounds
    assert len({row.accepted for row in absolute.stats.rows}) > 1, "rows have to differ"
