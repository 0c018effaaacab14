"""The distribution of the next token against a slow reference, where edits exclude all ids, and bad parameters."""

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.errors import ConfigError
from engine import Decoder, Request
from engine.batch import Batch
from engine.sampling.distribution import Distribution, Filters, SamplingParams, argmax, logits_to_probs
from tests.support.filter_cases import FILTERS, kept_by_sorting, scaled_logits
from tests.support.tiny import TINY, decode, tiny_runner

PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=150)
# Halves are exact in every dtype, and few values make ties frequent.
LOGITS = st.one_of(st.integers(-12, 12).map(lambda n: n / 2), st.just(-math.inf))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.5, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 8, 100]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.05, 0.31, 0.5, 0.77, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95]),
)


@st.composite
def logit_rows(draw) -> list[float]:
    """Draw a row of at most 9 logits, at least one of them finite."""
    row = draw(st.lists(LOGITS, min_size=1, max_size=9))
    assume(max(row) > -math.inf)
    return row


def reference(logits: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """Return the distribution, and the least distance of a value from a filter's edge."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))], math.inf
    top = logits[order[0]]
    weight = [math.exp((logit - top) / params.temperature) for logit in logits]
    closest = min((abs(w - params.min_p) for w in weight if 0 < w < 1 and params.min_p), default=math.inf)
    order = [token for token in order if weight[token] >= params.min_p]
    whole = math.fsum(weight[token] for token in order)
    kept = []
    for rank, token in enumerate(order):
        before = math.fsum(weight[other] for other in order[:rank]) / whole
        if rank and params.top_p < 1:
            closest = min(closest, abs(before - params.top_p))
        if (params.top_k == 0 or rank < params.top_k) and (params.top_p == 1 or before < params.top_p or rank == 0):
            kept.append(token)
    mass = math.fsum(weight[token] for token in kept)
    if params.typical_p < 1:
        law = {token: weight[token] / mass for token in kept if weight[token] / mass > 0}
        entropy = -math.fsum(p * math.log(p) for p in law.values())
        apart = {token: abs(-math.log(p) - entropy) for token, p in law.items()}
        kept, before = [], 0.0
        for token in sorted(law, key=lambda token: (apart[token], token)):
            unlike = [abs(apart[token] - apart[other]) for other in law if logits[other] != logits[token]]
            closest = min([closest, abs(before - params.typical_p), *unlike])
            if before < params.typical_p:
                kept.append(token)
            before += law[token]
        mass = math.fsum(weight[token] for token in kept)
    return [weight[token] / mass if token in kept else 0.0 for token in range(len(logits))], closest


def assert_same_distribution(probs: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(probs.double(), wanted, rtol=0, atol=tolerance)
    assert torch.equal(probs > 0, wanted.to(probs.dtype) > 0), "another set of tokens"


@PROPERTY
@given(logit_rows(), PARAMS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
@example([0.0], SamplingParams(0.7, 3, 0.2), torch.float32)
@example([1.0] * 9, SamplingParams(1.0, 4), torch.bfloat16)
@example([1.0] * 8, SamplingParams(1.0, 5, 0.6), torch.float64)
@example([-math.inf, 2.0, -math.inf, 2.0], SamplingParams(0.3, 3, 0.9), torch.float32)
@example([5.0, 1.0, 0.0], SamplingParams(20.0, 100, 0.05), torch.float16)
@example([4.0, 3.0, 2.0, 1.0], SamplingParams(1.0, 3, 0.65), torch.float64)  # the first: 0.64, of three 0.67
@example([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0], SamplingParams(1.0, 4), torch.float64)
def test_one_row_has_the_law_of_the_reference(row, params, dtype):
    wanted, closest = reference(row, params)
    double = dtype == torch.float64
    # Where a mass all but equals top_p, rounding may decide; exact cases have another test.
    assume(closest > (1e-12 if double else 1e-5))
    probs = logits_to_probs(torch.tensor(row, dtype=dtype), params)
    assert probs.dtype == (torch.float64 if double else torch.float32)
    wanted = torch.tensor(wanted, dtype=torch.float64)
    assert_same_distribution(probs, wanted, 1e-14 if double else 2e-6)


@settings(PROPERTY, max_examples=60)
@given(st.data(), st.integers(1, 8), st.integers(1, 5), st.integers(1, 3))
def test_rows_of_a_batch_do_not_depend_on_their_neighbours(data, vocab, batch, steps):
    """Each row's distribution is that of the row alone, to the bit, whatever its neighbours' filters."""
    params = data.draw(st.lists(PARAMS, min_size=batch, max_size=batch))
    n = batch * steps * vocab
    logits = torch.tensor(data.draw(st.lists(LOGITS, min_size=n, max_size=n)), dtype=torch.float64)
    logits = logits.reshape(batch, steps, vocab)
    logits[..., 0] = logits[..., 0].clamp(min=-6)
    law = Distribution.of(params)
    probs, logprobs = law.probs(logits), law.logprobs(logits)
    assert probs.shape == logprobs.shape == logits.shape
    for row, filters in enumerate(params):
        assert torch.equal(probs[row], logits_to_probs(logits[row], filters))
        assert torch.equal(probs[row], Distribution.of([filters]).probs(logits[row : row + 1])[0])
        for step in range(steps):
            wanted, closest = reference(logits[row, step].tolist(), filters)
            if closest > 1e-12:
                assert_same_distribution(probs[row, step], torch.tensor(wanted, dtype=torch.float64), 1e-14)
    for step in range(steps):
        assert torch.equal(law.probs(logits[:, step]), probs[:, step])
        assert torch.equal(law.logprobs(logits[:, step]), logprobs[:, step])
    # Not the other way round: a small probability becomes 0 where its logarithm is still finite.
    torch.testing.assert_close(logprobs.exp(), probs, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("vocab", [2, 16])
def test_top_p_counts_the_mass_before_an_id_and_excludes_it_at_equality(vocab):
    """Equal logits, whose masses are exact: n ids of a row of V reach a top_p of n / V, the lowest ones."""
    equal = torch.zeros(vocab, dtype=torch.float64)
    for n in range(1, vocab):
        at, beyond = (logits_to_probs(equal, SamplingParams(1.0, top_p=p / vocab)) for p in (n, n + 0.5))
        assert at.tolist() == [1 / n] * n + [0.0] * (vocab - n)
        assert int((beyond > 0).sum()) == n + 1


@pytest.mark.parametrize("vocab,dtype", [(1, torch.float32), (9, torch.float64), (2003, torch.float32)])
def test_filters_keep_what_they_keep_of_a_sorted_row_and_sort_none(monkeypatch, vocab, dtype):
    each = [(scaled, kept_by_sorting(scaled)) for scaled in scaled_logits(vocab, dtype)]
    monkeypatch.setattr(Tensor, "sort", lambda *_, **__: pytest.fail("the vocabulary is sorted"))
    for scaled, kept in each:
        assert torch.equal(Distribution.of(FILTERS).kept(scaled), kept)
        for row, params in enumerate(FILTERS):
            assert torch.equal(Distribution.of([params]).kept(scaled[row : row + 1])[0], kept[row])


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_break_no_other_row(value, top_k):
    params, logits = SamplingParams(1.0, top_k, 0.5), torch.linspace(0, 5, 18).reshape(2, 9)
    alone = Distribution.of([params]).probs(logits[1:])
    logits[0, 4] = value
    assert torch.equal(Distribution.of([params] * 2).probs(logits)[1:], alone)


def test_a_greedy_tie_goes_to_the_lowest_id():
    assert argmax(torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0] * 4])).tolist() == [1, 0]
    many = torch.randint(9, (2, 3, 256), generator=torch.Generator().manual_seed(0)).float()
    many[0, 0], many[1, 1, 200] = 0, math.nan
    assert argmax(many[0, 0]) == 0 and argmax(many)[1, 1] == 200
    assert argmax(many).equal(many.argmax(dim=-1)) and argmax(many.bfloat16()).equal(many.argmax(dim=-1))


@pytest.mark.parametrize(
    "field,values",
    [
        ("temperature", [-1.0, 1e-6, 1e39, math.inf, math.nan, -math.inf, True, "1"]),
        ("top_k", [-1, 2**63, 2.5, True, "3"]),
        ("top_p", [0.0, -0.1, 1.01, math.nan, True, "0.5"]),
        ("seed", [-1, 2**63, 1.7e9, False]),
        ("min_p", [-0.1, 1.01, math.nan, True]),
        ("typical_p", [0.0, 1.01, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 101.0, math.nan, "2"]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1]),
        ("min_tokens", [-1, 1.5, True]),
        ("logit_bias", [{3: 101.0}, {3: math.nan}]),
        ("bad_words", [[[]], [[1] * 17], [[1]] * 129]),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"--{field}"):
            SamplingParams(**{field: value})


def test_where_all_ids_are_excluded_tokens_are_still_drawn():
    rules = SamplingParams(1.0, bad_words=[[id_] for id_ in range(9)], min_tokens=3, repetition_penalty=100.0)
    batch = Batch(1, Filters.of([rules]), n_ids=9)
    batch.set_state([0], [0], [0], [Request([1], 9, [2, 3], rules)])
    for dtype in (torch.float32, torch.float64):
        logits = batch.processed(torch.randn(1, 1, 9, dtype=dtype), torch.zeros(1, 0, dtype=torch.int64))
        probs = Distribution.of([rules]).probs(logits)
        assert float(probs.sum()) == pytest.approx(1) and float(probs[..., 2:4].sum()) == 0


@pytest.mark.parametrize("rules", [{"logit_bias": {TINY.vocab_size: 1.0}}, {"bad_words": [[1, -1]]}])
def test_ids_outside_the_vocabulary_are_refused(rules):
    decoder = Decoder(tiny_runner(2))
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        decoder.submit(Request([1, 2], 5, sampling=SamplingParams(**rules)))
    decode(decoder, request := Request([1, 2], 5))
    assert len(request.tokens) == 5


def test_a_stop_token_that_is_no_id_bans_none():
    """Some tokenizers have -1 in the place of an id that they lack."""
    sampling = SamplingParams(min_tokens=6, logit_bias={TINY.vocab_size - 1: 30.0})
    for stops in ((), (-1,), (-100, TINY.vocab_size)):
        request = Request([5, 9], 6, stops, sampling)
        decode(Decoder(tiny_runner(1)), request)
        assert request.tokens == [TINY.vocab_size - 1] * 6
