"""Rates for the steps of a server: of its own chips, of this machine if it was measured, or none."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.derive import derive_generation
from meshwright.algebra.generation.program import Storage
from meshwright.api.served_step import step_prices
from meshwright.core.dims import COLLECTIVES
from meshwright.spec.calibration import save_calibration
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip
from meshwright.spec.strategy import Strategy, make_mesh
from tests.bench.test_machine_step import KNOWN, calibration

MODEL, STORAGE = load_model("llama3-8b"), Storage(page_len=16, num_pages=8)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def priced(kind, state="fp32", num_engines=1):
    """Prices of engines on devices that call themselves so, and of a step of theirs."""
    strategy = Strategy(mesh=make_mesh({"tensor": 4}), state=state)
    step = SimpleNamespace(
        model=MODEL,
        strategy=strategy,
        storage=STORAGE,
        derived=derive_generation(MODEL, strategy, STORAGE),
        mesh=SimpleNamespace(devices=np.array([SimpleNamespace(device_kind=kind)] * 4)),
    )
    prices = step_prices([SimpleNamespace(packed=step)] * num_engines)
    return prices, prices.of([[8, 800, 0, 0, 808, 8]])[0]


def test_a_chip_of_the_catalogue_needs_no_measurement(cache):
    prices, (seconds, weights, _, flops) = priced("NVIDIA H100 80GB HBM3", "bf16-adam", num_engines=2)
    assert prices.peak_flops_per_s == 2 * chip("h100").peak_flops["bf16"]
    assert prices.peak_bytes_per_s == 2 * chip("h100").hbm_bytes_per_s
    assert seconds > weights / chip("h100").hbm_bytes_per_s
    assert seconds > flops / chip("h100").peak_flops["bf16"]
    assert not list(cache.iterdir())


def test_this_machine_is_priced_once_it_is_measured(cache):
    prices, (seconds, weights, _, _) = priced("cpu")
    assert (prices.clock, prices.peak_flops_per_s) == (None, 0)
    assert np.isnan(seconds)
    assert weights > 0
    assert not list(cache.iterdir())  # nothing was measured
    rate, *_ = (found := calibration(host=KNOWN)).collectives
    every = tuple(replace(rate, kind=kind) for kind in COLLECTIVES)
    save_calibration(replace(found, collectives=every), cache / "calibration-cpu-4.toml")
    measured, found = priced("cpu")
    assert found[0] > 0
    assert measured.peak_bytes_per_s > 0
    assert found[1] == weights
    assert priced("cpu", "bf16-adam")[0].clock is not None


def test_a_chip_that_nobody_knows_has_bytes_and_flops():
    prices, found = priced("Abacus 9000")
    assert prices.clock is None
    assert np.isnan(found[0])
    assert (found[1:] > 0).all()
