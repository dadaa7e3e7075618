"""Designs of the KV cache: heads, latents, shared layers, windows, and the accounting that they agree with."""

import pytest

from meshwright.cli.verbs.show_model import cache_designs
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.spec.catalogue import load_model, models


@pytest.mark.parametrize("name", models())
def test_the_own_design_is_what_the_accounting_counts(name):
    (own,) = [design for design in cache_designs(load_model(name)) if design["own"]]
    assert own["bytes_per_token"]["bf16"] == kv_cache_bytes(load_model(name), 1)
    assert own["sequence"]["bytes"] == kv_cache_bytes(load_model(name), own["sequence"]["positions"])


def test_grouped_heads_share_of_full_heads():
    by_name = {d["design"]: d["bytes_per_token"]["int8"] for d in cache_designs(load_model("llama3-70b"))}
    assert list(by_name) == ["MHA, 64 heads", "GQA, 8 heads", "MQA, 1 head", "GQA, 8 heads, 2 layers share"]
    full, grouped, one, shared = by_name.values()
    assert full == 2 * 64 * 128 * 80
    assert (full / grouped, grouped / one, grouped / shared) == (8, 8, 2)


def test_latents_and_windows():
    latent = {d["design"]: d["elements_per_layer"] for d in cache_designs(load_model("deepseek-v3"))}
    assert latent["MLA, rank 512"] == 512 + 64
    assert latent["MHA, 128 heads"] == 128 * (192 + 128)
    gemma = load_model("gemma3-27b")
    sizes = {d["design"]: d["sequence"]["bytes"] for d in cache_designs(gemma)}
    near, layers = len(gemma.sliding_layers), gemma.num_layers
    assert sizes["GQA, 16 heads"] / sizes["GQA, 16 heads, no windows"] == pytest.approx(
        (near * 1024 + (layers - near) * 32768) / (layers * 32768)
    )
