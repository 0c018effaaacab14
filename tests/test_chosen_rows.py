"""Policies that choose anew: rows by name, entries of 8 bits, and drafts of some layers."""

from dataclasses import replace

import pytest
import torch
from chosen_rows import CHOSEN, GAMMA, LENGTHS, LONGEST, Rows, retrieval_cache, topk_cache
from tiny import TINY, tiny_model, tiny_runner

from common.errors import ConfigError
from engine import SelfSpeculation, generate
from models.llama import select_layers

of_both_policies = pytest.mark.parametrize("new_cache", [topk_cache, retrieval_cache])


def means(rows: Rows) -> torch.Tensor:
    """Return the means of chunks by layer and row, empty for a policy without chunks."""
    return getattr(rows.cache, "means", rows.cache.entries[:, 0, :, :0])


@of_both_policies
def test_rows_by_name_choose_as_all_do_and_others_stay(new_cache):
    """Some of the rows, in another order, with fewer drafts than the block whose queries were noted before."""
    together, apart = Rows(new_cache()), Rows(new_cache())
    for one in (together, apart):
        one.round([0, 0, 0, 0])
    together.round([2, 1, 0, 2], gamma=2)
    before = [x.clone() for x in (apart.cache.entries[:, :, 1:3], means(apart)[:, 1:3])]
    apart.round([2, 2], rows=[3, 0], gamma=2)
    for row in (0, 3):
        torch.testing.assert_close(apart.cache.entries[:, :, row], together.cache.entries[:, :, row])
        torch.testing.assert_close(means(apart)[:, row], means(together)[:, row])
    assert torch.equal(apart.cache.entries[:, :, 1:3], before[0])
    assert torch.equal(means(apart)[:, 1:3], before[1])


@of_both_policies
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_entries_of_8_bits_are_chosen_by_their_values(new_cache, stored):
    """Entries are copied as they are between equal storages, and converted between others."""
    model = tiny_model(dtype=torch.float32)
    same, wide = (Rows(new_cache(dtype=dtype), model, stored) for dtype in (stored, torch.float32))
    narrow, plain = (Rows(new_cache(dtype=dtype), model) for dtype in (stored, torch.float32))
    for rows in (same, wide, narrow, plain):
        rows.round([1, 1, 1, 1])
    for eight, full in ((same, wide), (narrow, plain)):
        values = eight.cache.entries.float() * eight.cache.scales[..., None]
        error = 0 if full is wide else 0.04 * values.abs().max()
        assert (values - full.cache.entries)[:, :, [0, 2, 3], :, :CHOSEN].abs().max() <= error
        assert torch.equal(means(eight).float(), means(full).float())
    assert not torch.equal(same.cache.entries.float(), narrow.cache.entries.float())


@of_both_policies
def test_a_draft_of_some_layers_chooses_by_those(new_cache):
    config = replace(TINY, n_layer=4)
    model = tiny_model(config)
    shallow = select_layers(model, [1, 3])
    every, some = Rows(new_cache(config), model), Rows(new_cache(shallow.config), model, draft=(shallow, [1, 3]))
    for rows in (every, some):
        rows.round([2, 2, 2, 2])
    assert torch.equal(some.cache.entries, every.cache.entries[[1, 3]])
    assert torch.equal(means(some), means(every)[[1, 3]])


def test_a_text_beyond_the_longest_is_refused():
    runner = tiny_runner(len(LENGTHS))
    drafter = SelfSpeculation(runner, retrieval_cache(), GAMMA)
    with pytest.raises(ConfigError):
        generate(runner, [[1] * (LONGEST - 5)], max_new_tokens=3, drafter=drafter)
