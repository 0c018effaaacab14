"""The flash backend over stand-ins for its three packages, against the reference backend."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import fake_flash_attn
import pytest
import torch
from tiny import full_cache, random_prompts, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine import ModelRunner, SelfSpeculation, generate
from kv_cache import StreamingKVCache
from kv_cache.entries import KV, quantize
from models.attention.base import MAX_BLOCK, AttentionSpec
from models.attention.flash_backend import (
    FA2,
    FA3,
    FA3_FWD,
    FlashAttention,
    Flavour,
    find_flavour,
    pack,
    split_count,
    unpack,
)
from models.attention.torch_backend import TorchAttention

PACKAGES = {"fa3": FA3, "fa3_fwd": FA3_FWD, "fa2": FA2}
N_SLOT = 40
HEAD_DIM = 16
HALVES = (torch.float16, torch.bfloat16)


def fake(package, dtypes=None):
    dtypes = dtypes or package.dtypes
    if package is FA2:
        return fake_flash_attn.fake_fa2(dtypes)
    return fake_flash_attn.fake_fa3(package.module, dtypes, package.has_windows)


def flavour_of(package, module, n_processor):
    return Flavour(package, module.flash_attn_with_kvcache, n_processor)


@dataclass
class Slots:
    positions: torch.Tensor
    in_order: bool = True
    block_ends_view: bool = False


class CountingFallback:
    """The reference backend, and how often each of its calls was made."""

    name = "torch"

    def __init__(self):
        self.inner, self.prepared, self.attended = TorchAttention(), 0, 0

    def prepare(self, spec, queries, slots):
        self.prepared += 1
        return self.inner.prepare(spec, queries, slots)

    def attend(self, q, kv, prepared):
        self.attended += 1
        return self.inner.attend(q, kv, prepared)


@dataclass
class Case:
    spec: AttentionSpec
    q: torch.Tensor
    kv: KV
    queries: torch.Tensor
    slots: Slots

    def run(self, backend):
        return backend.attend(self.q, self.kv, backend.prepare(self.spec, self.queries, self.slots))


def make_case(n_token, group, n_kv_head=2, window=None, dtype=torch.float32, starts=(0, 9, 17, 1), n_slot=N_SLOT):
    """Ragged rows over a head-major cache whose invisible slots hold leftovers."""
    generator = torch.Generator().manual_seed(100 * n_token + 10 * group + n_kv_head)
    batch = len(starts)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q = normal(batch, n_token, n_kv_head * group, HEAD_DIM)
    keys, values = (normal(batch, n_kv_head, n_slot, HEAD_DIM).transpose(1, 2) for _ in range(2))
    queries = torch.tensor(starts)[:, None] + torch.arange(n_token)
    slot = torch.arange(n_slot).expand(batch, -1)
    positions = torch.where(slot <= queries[:, -1:], slot, -1)
    spec = AttentionSpec(n_kv_head * group, n_kv_head, HEAD_DIM, window, dtype)
    return Case(spec, q, KV(keys, values), queries, Slots(positions))


def make_backend(package, dtypes=(torch.float32,), n_processor=132):
    """The backend over a stand-in that also takes `dtypes`, its fallback, and the stand-in's calls."""
    module = fake(package, dtypes)
    fallback = CountingFallback()
    backend = FlashAttention(flavour_of(package._replace(dtypes=dtypes), module, n_processor), fallback)
    return backend, fallback, module.calls


def assert_equals_reference(case, out):
    torch.testing.assert_close(out, case.run(TorchAttention()), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("n_token", [1, 2, 4, 8, MAX_BLOCK])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_equals_the_reference_on_ragged_rows(package, n_token, group):
    case = make_case(n_token, group)
    backend, fallback, calls = make_backend(package)
    assert_equals_reference(case, case.run(backend))
    assert len(calls) == 1 and fallback.attended == fallback.prepared == 0


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("n_token", [1, 5])
def test_one_prepared_block_serves_every_layer(package, n_token):
    case, other = make_case(n_token, 3), make_case(n_token, 3, starts=(2, 2, 2, 2))
    backend, _, _ = make_backend(package)
    prepared = backend.prepare(case.spec, case.queries, case.slots)
    for kv in (case.kv, other.kv):
        assert_equals_reference(replace(case, kv=kv), backend.attend(case.q, kv, prepared))


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_half_precision_comes_back_in_its_own_dtype(package):
    case = make_case(4, 3, dtype=torch.bfloat16)
    backend, _, calls = make_backend(package, dtypes=HALVES)
    out = case.run(backend)
    assert out.dtype == torch.bfloat16 and calls
    exact = replace(case, spec=replace(case.spec, dtype=torch.float32), q=case.q.float())
    wanted = exact.run(TorchAttention())
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("n_token", [2, MAX_BLOCK])
def test_fa2_gets_the_group_as_rows_over_what_precedes_the_block(n_token):
    case = make_case(n_token, 4, n_kv_head=2)
    backend, _, calls = make_backend(FA2)
    case.run(backend)
    (call,) = calls
    assert call["q"] == (4, n_token * 4, 2, HEAD_DIM) and not call["causal"]
    assert call["lengths"].tolist() == case.queries[:, 0].tolist()


@pytest.mark.parametrize("n_token,group", [(1, 4), (8, 1)])
def test_fa2_packs_a_single_token_and_single_heads_itself(n_token, group):
    case = make_case(n_token, group)
    backend, _, calls = make_backend(FA2)
    case.run(backend)
    assert calls[0]["q"] == case.q.shape and calls[0]["causal"]


@pytest.mark.parametrize("package", [FA3, FA3_FWD], ids=["fa3", "fa3_fwd"])
@pytest.mark.parametrize("group", [1, 4])
def test_fa3_is_told_to_pack_and_how_to_split(package, group):
    case = make_case(4, group, n_slot=4096)
    backend, _, calls = make_backend(package)
    case.run(backend)
    (call,) = calls
    assert call["q"] == case.q.shape and call["causal"] and call["pack_gqa"] == (group > 1)
    assert call["num_splits"] == 132 // (4 * 2)


def test_splits_fill_the_device_once_and_stay_within_the_keys():
    assert split_count(n_tile=1, n_slot=1 << 20, n_processor=132) == 128
    assert split_count(n_tile=8, n_slot=1 << 20, n_processor=132) == 16
    assert split_count(n_tile=8, n_slot=1024, n_processor=132) == 4
    assert split_count(n_tile=8, n_slot=100, n_processor=132) == 1
    assert split_count(n_tile=500, n_slot=1 << 20, n_processor=132) == 1


def test_a_tile_holds_the_rows_of_several_tokens():
    """64 tokens of 4 query heads are two tiles for each of the two KV heads."""
    case = make_case(64, 4, starts=(2048 - 64,), n_slot=2048)
    case.slots.block_ends_view = True
    backend, _, calls = make_backend(FA3, n_processor=16)
    case.run(backend)
    assert calls[0]["num_splits"] == 4


@pytest.mark.parametrize("n_token", [1, 2, 8])
@pytest.mark.parametrize("window", [1, 3, 12, 100])
def test_fa3_applies_a_sliding_window(n_token, window):
    case = make_case(n_token, 3, window=window)
    backend, fallback, calls = make_backend(FA3)
    assert_equals_reference(case, case.run(backend))
    assert calls and not fallback.attended


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_chunk_that_ends_its_view_runs_on_flash(package):
    n_token = 24
    case = make_case(n_token, 3, starts=(N_SLOT - n_token,) * 2)
    case.slots.block_ends_view = True
    backend, fallback, calls = make_backend(package)
    assert_equals_reference(case, case.run(backend))
    assert calls and not fallback.attended


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("n_token", [2, MAX_BLOCK])
def test_an_idle_row_is_finite_and_leaves_the_others_alone(package, n_token):
    """A row that was never admitted has all its queries at position 0, here over a view of T slots."""
    case = make_case(n_token, 3, starts=(0, 0, 0), n_slot=n_token)
    case.queries[1] = 0
    backend, _, _ = make_backend(package)
    out, wanted = case.run(backend), case.run(TorchAttention())
    assert out.isfinite().all()
    torch.testing.assert_close(out[[0, 2]], wanted[[0, 2]], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out[1, -1], wanted[1, -1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("n_slot", [1, 4])
def test_fa2_stays_within_a_view_whose_last_position_repeats(n_slot):
    case = make_case(2, 3, starts=(n_slot - 1,) * 2, n_slot=n_slot)
    case.queries[:, 1] = n_slot - 1
    backend, _, calls = make_backend(FA2)
    assert_equals_reference(case, case.run(backend))
    assert calls


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("slots", [2, 5])
def test_speculative_decoding_over_flash_gives_the_tokens_of_torch(package, slots):
    """Ragged prompts, idle rows, prefill in chunks, and drafts over a ring, which is the fallback's."""
    model, prompts = tiny_model(dtype=torch.float32), random_prompts([5, 17, 1])
    wanted = generate(ModelRunner(model, full_cache(model, slots)), prompts, max_new_tokens=10).tokens
    model.backend, fallback, calls = make_backend(package)
    runner = ModelRunner(model, full_cache(model, slots), prefill_chunk=4)
    draft_cache = StreamingKVCache(model.config, slots, 8, 1, dtype=torch.float32)
    out = generate(runner, prompts, max_new_tokens=10, drafter=SelfSpeculation(runner, draft_cache, gamma=3))
    assert out.tokens == wanted
    assert calls and fallback.attended


def as_ring(case):
    """The same content with its slots in another order."""
    order = torch.randperm(case.slots.positions.shape[1], generator=torch.Generator().manual_seed(0))
    slots = Slots(case.slots.positions[:, order], in_order=False)
    return replace(case, slots=slots, kv=KV(case.kv.keys[:, order], case.kv.values[:, order]))


def as_int8(case):
    (keys, key_scales), (values, value_scales) = (quantize(x, torch.int8) for x in case.kv[:2])
    return replace(case, kv=KV(keys, values, key_scales, value_scales))


FALLBACKS = {
    "ring": lambda: as_ring(make_case(4, 3)),
    "ring_of_one_token": lambda: as_ring(make_case(1, 3)),
    "int8": lambda: as_int8(make_case(4, 3)),
    "int8_of_one_token": lambda: as_int8(make_case(1, 3)),
    "ragged_chunk": lambda: make_case(MAX_BLOCK + 1, 3),
    "head_dim": lambda: narrow_heads(make_case(4, 3)),
    "dtype": lambda: make_case(4, 3, dtype=torch.float64),
}


def narrow_heads(case, head_dim=12):
    kv = KV(case.kv.keys[..., :head_dim].clone(), case.kv.values[..., :head_dim].clone())
    return replace(case, spec=replace(case.spec, head_dim=head_dim), q=case.q[..., :head_dim].contiguous(), kv=kv)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_flash_cannot_express_goes_to_the_fallback(package, reason):
    case = FALLBACKS[reason]()
    backend, fallback, calls = make_backend(package)
    prepared = backend.prepare(case.spec, case.queries, case.slots)
    for _ in range(2):
        assert_equals_reference(case, backend.attend(case.q, case.kv, prepared))
    assert (fallback.prepared, fallback.attended) == (1, 2) and not calls


def test_8_bit_entries_are_dequantised_as_the_fallback_does():
    backend, fallback, _ = make_backend(FA3)
    fallback.dequantizes = lambda n_token: n_token > 3
    assert [backend.dequantizes(n_token) for n_token in (3, 4)] == [False, True]


@pytest.mark.parametrize("package", [FA2, FA3_FWD], ids=["fa2", "fa3_fwd"])
@pytest.mark.parametrize("n_token", [1, 4])
def test_windows_go_to_the_fallback_where_the_package_lacks_them(package, n_token):
    case = make_case(n_token, 3, window=5)
    backend, fallback, calls = make_backend(package)
    assert_equals_reference(case, case.run(backend))
    assert fallback.attended == 1 and not calls


@pytest.mark.parametrize(
    "package,change,reason",
    [
        (FA3, {"dtype": torch.float32}, "the model is in torch.float32"),
        (FA2, {"dtype": torch.float64}, "takes torch.float16 or torch.bfloat16"),
        (FA3_FWD, {"dtype": torch.float16}, "fa3-fwd takes torch.bfloat16, the model is in torch.float16"),
        (FA2, {"head_dim": 264}, "head dims up to 256"),
        (FA3, {"head_dim": 100}, "multiples of 8, the model's is 100"),
        (FA2, {"sliding_window": 7}, "FlashAttention-2 cannot apply the model's sliding window of 7 tokens"),
        (FA3_FWD, {"sliding_window": 7}, "cannot apply"),
    ],
)
def test_unsupported_specs_are_named(package, change, reason):
    flavour = flavour_of(package, fake(package), n_processor=132)
    spec = AttentionSpec(8, 2, 128, None, torch.bfloat16)
    assert flavour.unsupported(spec) is None
    assert reason in flavour.unsupported(replace(spec, **change))


def test_packing_is_undone_and_keeps_groups_together():
    x = torch.arange(2 * 3 * 6).view(2, 3, 6, 1)
    rows = pack(x, n_kv_head=2)
    assert rows.shape == (2, 9, 2, 1)
    assert rows[0, :, 1, 0].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]
    assert torch.equal(unpack(rows, n_token=3), x)


class NoHostReads(TorchDispatchMode):
    """Refuses whatever would wait for the device, or make a shape depend on content."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refused = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "unique")
        assert not any(name in str(func) for name in refused), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("n_token", [1, 4])
def test_nothing_is_read_on_the_host(package, n_token):
    case = make_case(n_token, 3)
    backend, _, calls = make_backend(package)
    with NoHostReads():
        case.run(backend)
    assert calls


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a device of some compute capability with some of the packages."""

    def pretend(capability, *packages):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        )
        for package in PACKAGES.values():
            # None in sys.modules is what importing an absent module looks like, wherever the tests run.
            monkeypatch.setitem(sys.modules, package.module, fake(package) if package in packages else None)

    return pretend


@pytest.mark.parametrize(
    "capability,installed,wanted",
    [
        ((9, 0), (FA3, FA3_FWD, FA2), FA3),
        ((9, 0), (FA3_FWD, FA2), FA3_FWD),
        ((9, 0), (FA2,), FA2),
        ((8, 0), (FA3, FA3_FWD, FA2), FA2),
        ((10, 0), (FA3, FA3_FWD, FA2), FA2),
    ],
)
def test_the_best_package_for_the_device_is_taken(machine, capability, installed, wanted):
    machine(capability, *installed)
    flavour, why = find_flavour("cuda")
    assert flavour.package is wanted and flavour.n_processor == 132
    assert flavour.kernel is sys.modules[wanted.module].flash_attn_with_kvcache
    assert wanted.title in why and wanted.module in why


@pytest.mark.parametrize("capability,installed", [((9, 0), ()), ((8, 6), (FA3, FA3_FWD))])
def test_a_missing_package_is_named(machine, capability, installed):
    machine(capability, *installed)
    flavour, why = find_flavour("cuda")
    assert flavour is None
    assert why.startswith("no flash package could be imported: ") and "FlashAttention-2 (flash_attn): " in why
    assert ("fa3-fwd (fa3_fwd_interface): " in why) == (capability[0] == 9)


def test_a_package_that_does_not_load_is_passed_over(machine, monkeypatch):
    """One built for another CUDA, and one too old to have the function."""
    machine((9, 0), FA2)
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_with_kvcache")
    flavour, why = find_flavour("cuda")
    assert flavour is None and "has no attribute 'flash_attn_with_kvcache'" in why


@pytest.mark.parametrize("device,reason", [("cpu", "a CUDA device, not cpu"), ("cuda", "this device has 7.5")])
def test_devices_without_flash_are_named(machine, device, reason):
    machine((7, 5), FA2)
    flavour, why = find_flavour(device)
    assert flavour is None and reason in why


def test_importing_the_backends_imports_no_package():
    code = "import sys, models.attention, models.attention.flash_backend as backend\n"
    code += "print([p.module for p in (backend.FA2, backend.FA3, backend.FA3_FWD) if p.module in sys.modules])"
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_the_stand_ins_refuse_what_the_packages_refuse(package):
    kernel = fake(package).flash_attn_with_kvcache
    q, kv = torch.zeros(2, 1, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 5, 2, 16, dtype=torch.bfloat16)
    lengths = torch.ones(2, dtype=torch.int32)
    kernel(q, kv, kv, cache_seqlens=lengths, num_splits=1)
    for bad in (
        lambda: kernel(q, kv, kv, cache_seqlens=lengths.long(), num_splits=1),
        lambda: kernel(q, kv.transpose(1, 2), kv.transpose(1, 2), cache_seqlens=lengths, num_splits=1),
        lambda: kernel(q.float(), kv.float(), kv.float(), cache_seqlens=lengths, num_splits=1),
        lambda: kernel(q, kv.to(torch.float16), kv, cache_seqlens=lengths, num_splits=1),
        lambda: kernel(q.repeat(1, 1, 1, 17), *[kv.repeat(1, 1, 1, 17)] * 2, cache_seqlens=lengths, num_splits=1),
        lambda: kernel(q, kv, kv, cache_seqlens=lengths, num_splits=1000),
    ):
        with pytest.raises(RuntimeError):
            bad()
