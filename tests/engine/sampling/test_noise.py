"""Counter-based noise: the generator's bits, what a number depends on, and how its numbers are distributed."""

import itertools
import random

import pytest
import torch

from engine.sampling import noise
from engine.sampling.noise import Stream, uniform

WORD = 2**32
KNOWN_ANSWERS = [  # counter, key, output: the vectors published with Random123
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, straight from the paper's round function."""
    a, b, c, d = counter
    left, right = key
    for round_number in range(10):
        if round_number:
            left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second // WORD ^ b ^ left, second % WORD, first // WORD ^ d ^ right, first % WORD
    return [a, b, c, d]


def reference_uniform(seed: int, request: int, position: int, stream: int, token: int) -> float:
    counter = [token // 2, stream, position, request]
    block = reference_philox(counter, [seed % WORD, seed // WORD % WORD])
    high, low = block[2 * (token % 2) : 2 * (token % 2) + 2]
    return (high * 2**21 + low // 2**11) / 2**53


@pytest.mark.parametrize("counter,key,answer", KNOWN_ANSWERS)
def test_the_reference_gives_the_published_bits(counter, key, answer):
    counter, key, answer = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    assert reference_philox(counter, key) == answer


@pytest.mark.parametrize("blocks_per_pass", [None, 7, 64])
def test_uniform_equals_a_reference_in_python_integers(blocks_per_pass, monkeypatch):
    """Seeds and requests of rows, which broadcast, and positions of columns; in passes of any size."""
    if blocks_per_pass:
        monkeypatch.setitem(noise.BLOCKS_PER_PASS, "cpu", blocks_per_pass)
    rng = random.Random(1)
    edges = [0, 1, 2**31 - 1, 2**31, WORD - 1]
    seeds = [*edges, WORD, 2**63 - 1, *(rng.randrange(2**63) for _ in range(9))]
    requests = [rng.choice(edges) if row % 2 else rng.randrange(WORD) for row, _ in enumerate(seeds)]
    positions = [*edges, rng.randrange(WORD)]
    rows = [torch.tensor(values)[:, None] for values in (seeds, requests)]
    for stream, n_ids in zip(Stream, itertools.cycle((7, 1, 2)), strict=False):
        wanted = [
            [[reference_uniform(*row, position, stream, token) for token in range(n_ids)] for position in positions]
            for row in zip(seeds, requests, strict=True)
        ]
        assert uniform(*rows, torch.tensor(positions), stream, n_ids).tolist() == wanted
    assert uniform(*rows, torch.arange(0), Stream.ACCEPT).shape == (len(seeds), 0, 1)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_is_finite_at_both_ends_of_the_uniforms(extreme, dtype):
    """An infinity would win any argmax, and be NaN where p is 0."""
    values = noise.gumbel_of(torch.full((1, 3), extreme, dtype=torch.float64)).to(dtype)
    assert bool(torch.isfinite(values).all())
    assert bool((values < -3 if extreme < 0.5 else values > 30).all())
