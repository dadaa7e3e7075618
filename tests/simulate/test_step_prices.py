"""Prices of an engine's steps: counted by hand for a dense model, and the clock's seconds."""

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.derive import derive_generation
from meshwright.algebra.generation.program import Storage
from meshwright.api.rates import rates_for
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.work.ops import model_flops
from meshwright.simulate.service import PricedClock
from meshwright.simulate.step_prices import StepPrices
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Lora
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh
from meshwright.spec.weights import num_params

LLAMA = load_model("llama3-8b")
STORAGE = Storage(page_len=16, num_pages=100)
# rows that decode, their cached tokens, prefilled tokens, their pairs, positions, rows with logits
DECODE = [8, 8 * 511, 0, 0, 8 * 512, 8]
PROMPT = [0, 0, 256, 256 * 257 / 2, 256, 1]
BOTH = [8, 8 * 511, 256, 256 * (1000 + 257 / 2), 8 * 512 + 1256, 9]


def prices_of(model=LLAMA, storage=STORAGE, **mesh) -> StepPrices:
    strategy = Strategy(mesh=make_mesh(mesh or {"tensor": 1}), state="bf16-adam")
    return StepPrices(model, strategy, derive_generation(model, strategy, storage))


def kv_bytes_of_position(model) -> int:
    return 2 * 2 * model.num_kv_heads * model.head_dim * model.num_layers


def test_bytes_and_flops_of_a_dense_model():
    """Weights without the table of tokens, keys and values of every position, and the FLOPs that MFU counts."""
    found = prices_of().of([DECODE, PROMPT, BOTH])
    assert np.isnan(found[:, 0]).all()  # no rates, no seconds
    np.testing.assert_allclose(found[:, 1], 2 * (num_params(LLAMA) - LLAMA.vocab_size * LLAMA.d_model))
    np.testing.assert_allclose(found[:, 2], [kv_bytes_of_position(LLAMA) * one[4] for one in (DECODE, PROMPT, BOTH)])
    decode = model_flops(LLAMA, Job(kind="decode", batch_seqs=8, seq_len=512))
    prompt = model_flops(LLAMA, Job(kind="prefill", batch_seqs=1, seq_len=256), causal=True)
    np.testing.assert_allclose(found[0, 3], decode)
    # model_flops counts half of a square, a causal prompt has its diagonal too
    assert found[1, 3] == pytest.approx(prompt, rel=1e-3)
    earlier = 4 * 256 * 1000 * LLAMA.num_heads * LLAMA.head_dim * LLAMA.num_layers
    np.testing.assert_allclose(found[2, 3], found[0, 3] + found[1, 3] + earlier)


@pytest.mark.parametrize("length", [512, 65_536])
def test_layers_with_a_window_read_no_more_than_that(length):
    gemma = load_model("gemma2-9b")
    (_, _, kv, flops), *_ = prices_of(gemma).of([[8, 8 * (length - 1), 0, 0, 8 * length, 8]])
    assert flops == pytest.approx(model_flops(gemma, Job(kind="decode", batch_seqs=8, seq_len=length)))
    near = len(gemma.sliding_layers) / gemma.num_layers
    kept = (1 - near) * length + near * min(length, gemma.sliding_window)
    assert kv == pytest.approx(kv_bytes_of_position(gemma) * 8 * kept)


def test_windows_with_pages_of_their_own_are_read_alike():
    model = load_model("gemma2-9b")
    apart = prices_of(model, replace(STORAGE, window_pages=200))
    np.testing.assert_allclose(apart.of([DECODE, PROMPT, BOTH]), prices_of(model).of([DECODE, PROMPT, BOTH]))


def test_devices_share_the_work():
    whole, split = prices_of().of([BOTH]), prices_of(tensor=8).of([BOTH])
    np.testing.assert_allclose(split[:, 2:] * 8, whole[:, 2:])
    assert split[0, 1] * 8 == pytest.approx(whole[0, 1], rel=1e-3)  # vectors of norms are whole on each


def test_weights_and_caches_in_int8():
    plain = prices_of().of([DECODE])
    narrow = prices_of(storage=replace(STORAGE, weights="int8", cache_dtype="int8")).of([DECODE])
    assert narrow[0, 1] == pytest.approx(plain[0, 1] / 2, rel=1e-2)
    assert narrow[0, 2] == pytest.approx(plain[0, 2] / 2 * (1 + 4 / LLAMA.head_dim), rel=1e-6)  # a scale for each head


def test_adapters_are_read_with_the_weights():
    """The clock prices the model with all their columns, too."""
    model, chips = replace(LLAMA, lora=Lora(rank=16, alpha=16, targets="q,v")), parse_cluster("h100:1x1")
    shared = replace(STORAGE, adapters=2)
    prices = prices_of(model, shared)
    prices.set_rates(chips, rates_for(chips, None, fitted=True), shared)
    plain, (adapted,) = prices_of().of([DECODE]), prices.of([DECODE])
    extra = 16 * (2 * LLAMA.d_model + (LLAMA.num_heads + LLAMA.num_kv_heads) * LLAMA.head_dim) * LLAMA.num_layers
    assert adapted[1] - plain[0, 1] == pytest.approx(2 * extra)
    assert adapted[3] - plain[0, 3] == pytest.approx(2 * 8 * extra)
    assert adapted[0] > 0


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("prompts", {"data": 2, "context": 2, "tensor": 2}),
        ("gathered", {"fsdp": 8}),
        ("sequences", {"context": 2, "tensor": 4}),
        ("positions", {"context": 2, "tensor": 4}),
        ("widths", {"context": 2, "tensor": 4}),
    ],
)
def test_every_layout_of_a_plan_has_a_price(layout, axes):
    chips = parse_cluster("h100:8x1")
    strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam", assignment=LAYOUTS[layout])
    prices = StepPrices(LLAMA, strategy, derive_generation(LLAMA, strategy, STORAGE))
    prices.set_rates(chips, rates_for(chips, None, fitted=True), STORAGE)
    whole, split = prices_of().of([BOTH])[0], prices.of([BOTH])[0]
    assert np.isfinite(split).all()
    assert (split > 0).all()
    assert (split[1:] <= whole[1:] * (1 + 1e-9)).all()
    assert split[3] < whole[3] / 2


def test_experts_that_no_token_chose_are_not_read():
    mixtral = load_model("mixtral-8x7b")
    one, many = prices_of(mixtral).of([[1, 100, 0, 0, 101, 1], [256, 256 * 100, 0, 0, 256 * 101, 256]])
    experts = 2 * 3 * mixtral.num_layers * mixtral.num_experts * mixtral.d_model * mixtral.d_ff_expert
    assert many[1] - one[1] == pytest.approx(experts * 3 / 4, rel=1e-3)  # 2 of 8


@pytest.mark.parametrize("cluster", ["h100:8x1", "v5e:2x4"])
def test_seconds_are_those_of_the_clock(cluster):
    """Priced together or one by one; the peaks are the data sheet's."""
    chips, prices = parse_cluster(cluster), prices_of(tensor=8)
    rates = rates_for(chips, None, fitted=True)
    prices.set_rates(chips, rates, STORAGE)
    setting = Setting(LLAMA, chips, Job(kind="decode", batch_seqs=1, seq_len=1), rates, STORAGE)
    clock = PricedClock(setting, prices.strategy)
    asked = (8, 8 * 511, 0, 0.0), (0, 0, 256, 127.5), (8, 8 * 511, 256, 1127.5)
    expected = [clock.step_s(*one).item() for one in asked]
    np.testing.assert_allclose(prices.of([DECODE, PROMPT, BOTH])[:, 0], expected)
    assert prices.peak_flops_per_s == chips.chip.peak_flops["bf16"]
    assert prices.peak_bytes_per_s == chips.chip.hbm_bytes_per_s
    # a step that decodes a few rows cannot take less than reading its weights does
    (seconds, weights, kv, _), *_ = prices.of([DECODE])
    assert seconds > (weights + kv) / prices.peak_bytes_per_s


def test_a_dtype_without_rates_has_no_seconds():
    chips, prices = parse_cluster("cpu:1"), prices_of()
    with pytest.raises(InputError, match="cpu has no known peak"):
        prices.set_rates(chips, None, STORAGE)
    assert prices.clock is None
    assert prices.peak_flops_per_s == 0
    assert np.isfinite(prices.of([BOTH])[:, 1:]).all()
