"""Caches in pages against contiguous ones: the same logits, whatever pages the sequences have."""

import numpy as np
import pytest

from meshwright.hlo.collectives import collectives
from tests.parallel.generate_cases import FAMILIES, LENGTHS, NUM_STEPS, float_params, rows_of, step_of
from tests.traffic import compiled_traffic, derived_traffic


def logits_of(step, params, pages=None) -> np.ndarray:
    """Logits after the prompts and after each of some tokens more; ``pages`` are given to every step."""
    rows, longest = rows_of(step.model), int(LENGTHS.max())
    tokens = np.zeros((step.batch_seqs, step.padded_length(longest)), np.int32)
    tokens[:, :longest] = rows[:, :longest]
    placed = step.place(params)
    logits, cache = step.prefill(placed, step.init_cache(), tokens, LENGTHS, pages)
    found = [logits]
    for number in range(NUM_STEPS):
        positions = LENGTHS + number
        logits, cache = step.generate(placed, cache, rows[np.arange(len(rows)), positions], positions, pages)
        found.append(logits)
    return np.stack([np.asarray(one) for one in found])


def shuffled(step, seed: int = 0) -> np.ndarray:
    """A table of pages in no order at all, for one device's pool."""
    num_pages, each = step.cache_sizes["Pg"], step.cache_sizes["Bp"]
    return np.random.default_rng(seed).permutation(num_pages)[: step.batch_seqs * each].reshape(-1, each)


CASES = [
    ("llama", {}),
    ("gpt_oss", {}),
    pytest.param("gemma2", {}, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", {}, marks=pytest.mark.slow),
    pytest.param("llama", {"cache_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", {"cache_dtype": "int8"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_pages_change_nothing(name, options):
    """5 does not divide the 24 positions: the last page of each sequence has a slot that nothing fills."""
    params = float_params(FAMILIES[name])
    wanted = logits_of(step_of(FAMILIES[name], {}, **options), params)
    for page_len in (4, 5):
        step = step_of(FAMILIES[name], {}, page_len=page_len, **options)
        assert step.cache_sizes["Bp"] == -(-24 // page_len)
        for pages in (None, shuffled(step)):
            found = logits_of(step, params, pages)
            if options:
                # between two integers a value of an int8 cache may be rounded to either, in few rows
                np.testing.assert_allclose(found, wanted, atol=2e-2)
                far = np.abs(found - wanted).max(axis=-1) > 1e-5 * (1 + np.abs(wanted).max(axis=-1))
                assert far.mean() <= 0.25
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_only_layers_without_a_window_have_pages():
    step = step_of(FAMILIES["gemma2"], {}, page_len=4)
    assert {row.name: row.dims[:2] for row in step.table if row.name.startswith("cache_k")} == {
        "cache_k": ("Pg", "Pl"),
        "cache_k_local": ("B", "S"),
    }


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}])
def test_devices_have_the_pages_of_their_own_sequences(axes):
    params = float_params(FAMILIES["llama"])
    step = step_of(FAMILIES["llama"], axes, page_len=4)
    np.testing.assert_array_equal(step.init_pages()[:2], step.init_pages()[2:])  # two pools, the same numbers
    wanted = logits_of(step_of(FAMILIES["llama"], {}), params)
    np.testing.assert_allclose(logits_of(step, params), wanted, rtol=1e-4, atol=1e-4)
    mesh = step.strategy.mesh
    dims = {**step.model.dims, "B": step.batch_seqs, "T": 1, **step.cache_sizes}
    expected = derived_traffic(step.generate_declared, dims, mesh, num_microbatches=1, width=4)
    assert compiled_traffic(collectives(step.compiled(0).as_text(), mesh), mesh) == expected


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_decode_step_copies_no_pool(name):
    step = step_of(FAMILIES[name], {}, page_len=16, max_len=8192)
    smallest = min(row.num_bytes // row.num_layers for row in step.table)
    assert step.compiled(0).memory_analysis().temp_size_in_bytes < smallest
