"""The bound that the certificate measures: what widens it, and that a bound which measured a bug is not trusted."""

from dataclasses import replace

import pytest
import torch
from certificate_cases import (
    DTYPES,
    GAMMA,
    GREEDY,
    LENGTHS,
    N_FORCED,
    PROMPTS,
    calibration_of,
    speculate,
    with_blocks,
)
from machine import needs_vnni
from tiny import TINY, full_cache, tiny_model

from engine.evaluation.certificate import MAX_FLIP_SHARE, certify, replay
from kv_cache import FullKVCache
from kv_cache.entries import LARGEST
from models import Transformer
from models.attention import select_backend
from models.llama import attention_spec
from models.quantize import quantize_head, quantize_linears


class Reversed(Transformer):
    """Forwards of several tokens, also those of the calibration, take them in reverse order."""

    def forward(self, tokens, positions, cache):
        return super().forward(tokens.flip(1) if tokens.shape[1] == GAMMA + 1 else tokens, positions, cache)


@DTYPES
def test_a_bound_that_measured_a_bug_is_not_trusted(dtype):
    """A wrong forward of several tokens widens eps until everything is a near-tie: the flips give it away."""
    model = tiny_model(dtype=dtype)
    assert calibration_of(model).trusted
    model.__class__ = Reversed
    assert not calibration_of(model).trusted


def test_eps_is_the_largest_difference_between_a_block_and_single_tokens():
    def offset(logits, positions):  # one logit is 0.25 higher, at one position alone
        logits[..., 7] += 0.25 * (positions == LENGTHS[1] + 22)
        return logits

    exact = calibration_of(tiny_model())
    assert exact.eps < 1e-11
    assert (exact.flips, exact.positions) == (0, len(LENGTHS) * N_FORCED)
    measured = calibration_of(with_blocks(tiny_model(), offset))
    assert 2 * measured.eps == pytest.approx(0.25, abs=1e-11), "the gap that one logit alone can close"


class StaleScales(FullKVCache):
    """A slot that is written again keeps the scale of the draft that it held: a bug that needs a rejection."""

    def write(self, layer, slots, new, *store):
        scales = self.scales[layer]
        before = scales[:, self._rows, :, slots]
        super().write(layer, slots, new, *store)
        scales[:, self._rows, :, slots] = torch.where(before > 0, before, scales[:, self._rows, :, slots])


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_a_wrong_entry_of_8_bits_is_found_and_a_rounded_one_is_not(kv_dtype):
    model = tiny_model(dtype=torch.float32)

    def cache(kind: type[FullKVCache]) -> FullKVCache:
        return kind(TINY, len(PROMPTS), 128, dtype=kv_dtype)

    calibration = calibration_of(model, cache(FullKVCache))
    assert calibration.trusted
    for kind, holds in ((FullKVCache, True), (StaleScales, False)):
        emitted = speculate(model, GREEDY, cache=cache(kind))
        assert certify(replay(model, cache(FullKVCache), PROMPTS, emitted), calibration.eps).holds == holds


WIDE = replace(TINY, vocab_size=64, dim=64, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=96)


@needs_vnni
@pytest.mark.parametrize("kv_dtype", [torch.float32, *LARGEST])
def test_cpp_attention_and_int8_weights_give_the_same_bits_in_blocks(kv_dtype):
    model = tiny_model(WIDE, dtype=torch.float32)
    quantize_linears(model, "int8")
    quantize_head(model)
    model.backend, why = select_backend("auto", "cpu", attention_spec(WIDE, model.dtype), kv_dtype)
    if model.backend.name != "cpp":
        pytest.skip(why)
    for n_row in (len(PROMPTS), 1):
        calibration = calibration_of(model, full_cache(model, n_row, kv_dtype=kv_dtype))
        assert (calibration.eps, calibration.flips, calibration.trusted) == (0, 0, True)
    assert calibration.max_flip_share == MAX_FLIP_SHARE[kv_dtype]
