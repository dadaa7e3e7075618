"""The listings of docs/flash.md print what they say, and its kernel agrees with a dense float64 reference and with
the counts; `test_pages` runs its console blocks."""

import importlib.util
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.calculators.chips.stream import tiled_loop
from tests.blocks import run_listings
from tests.nn.attention.rules import equations
from tests.verify.compiled import compiled_for

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "flash.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def flash_attention():
    spec = importlib.util.spec_from_file_location("flash_attention", ROOT / "examples" / "flash_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flash_attention


def test_the_listings_print_what_they_say():
    listings = run_listings(PAGE)
    assert len(listings) == PAGE.count("```python\n") == 7
    for match, output in listings:
        assert output == match.group("said")


def test_the_kernel_is_small():
    assert (ROOT / "examples" / "flash_attention.py").read_text(encoding="utf-8").count("\n") < 120


def dense(q, k, v, do, *, causal):
    """Output, dq, dk and dv of one head in float64."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    if causal:
        scores = np.where(np.tri(*scores.shape), scores, -np.inf)
    P = np.exp(scores - scores.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    o, dP = P @ v, do @ v.T
    dS = P * (dP - (P * dP).sum(1, keepdims=True)) / np.sqrt(q.shape[1])
    return o, dS @ k, dS.T @ q, P.T @ do


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_the_kernel_agrees_with_dense_attention(flash_attention, block, causal):
    rng = np.random.default_rng(block)
    arrays = rng.normal(size=(4, 64, 32))
    # large scores: without the running maximum exp would overflow in fp32
    arrays[0] *= 40
    wanted = dense(*arrays, causal=causal)
    *operands, do = jnp.asarray(arrays, jnp.float32)
    o, pull = jax.vjp(lambda *args: flash_attention(*args, block, causal, True), *operands)
    for found, want in zip((o, *pull(do)), wanted, strict=True):
        np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())


def test_heads_of_a_group_share_keys(flash_attention):
    """q[T,K,G,H] with k[S,K,H]: gradients of shared keys are summed."""
    rng = np.random.default_rng(1)
    q, do = rng.normal(size=(2, 32, 2, 3, 16))
    k, v = rng.normal(size=(2, 32, 2, 16))
    one = lambda q, k, v: flash_attention(q, k, v, 16, True, True)  # noqa: E731
    grouped = jax.vmap(jax.vmap(one, (1, None, None), 1), (1, 1, 1), 1)
    o, pull = jax.vjp(grouped, *(jnp.asarray(a, jnp.float32) for a in (q, k, v)))
    dq, dk, dv = pull(jnp.asarray(do, jnp.float32))
    for head in range(2):
        parts = [dense(q[:, head, g], k[:, head], v[:, head], do[:, head, g], causal=True) for g in range(3)]
        for g, part in enumerate(parts):
            np.testing.assert_allclose(o[:, head, g], part[0], atol=1e-5)
            np.testing.assert_allclose(dq[:, head, g], part[1], atol=1e-5)
        np.testing.assert_allclose(dk[:, head], sum(part[2] for part in parts), atol=1e-5)
        np.testing.assert_allclose(dv[:, head], sum(part[3] for part in parts), atol=1e-5)


def specified_bytes(eqn, table):
    """Bytes of (operands, results) that the block specs of a kernel move: a block moves when its start changes."""
    mapping, moved = eqn.params["grid_mapping"], [0, 0]
    (num_steps,) = mapping.grid
    for number, block in enumerate(mapping.block_mappings):
        starts = [
            tuple(int(at) for at in block.compute_start_indices_interpret((jnp.int32(n),), jnp.asarray(table)))
            for n in range(num_steps)
        ]
        changes = 1 + sum(a != b for a, b in itertools.pairwise(starts))
        aval = block.block_aval
        moved[number >= mapping.num_inputs] += changes * int(np.prod(aval.shape)) * aval.dtype.itemsize
    return moved


@pytest.mark.parametrize("causal", [False, True])
def test_the_block_specs_move_the_bytes_that_are_counted(flash_attention, causal):
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)

    def both(q, k, v, do):
        o, pull = jax.vjp(lambda *args: flash_attention(*args, 16, causal, False), q, k, v)
        return o, pull(do)

    traced = equations(jax.make_jaxpr(both)(x, x, x, x).jaxpr)
    kernels = [equation for equation in traced if equation.primitive.name == "pallas_call"]
    for name, kernel in zip(("flash", "flash-backward"), kernels, strict=True):
        loop = tiled_loop(name, seq=64, width=32, block=16, causal=causal)
        assert kernel.params["grid_mapping"].grid == (loop.num_steps,)
        counted = [int(loop.moved_bytes(each).sum()) for each in (loop.operands, loop.results)]
        assert specified_bytes(kernel, loop.table()) == counted


@pytest.mark.aot
def test_the_kernels_compile_for_a_tpu(flash_attention):
    """In bf16, with heads added by vmap: one kernel forward, one backward."""
    x = jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16)

    def both(q, k, v, do):
        o, pull = jax.vjp(jax.vmap(lambda *args: flash_attention(*args, 128, True)), q, k, v)
        return o, pull(do)

    found = compiled_for("v5e:2x2", both, x, x, x, x).as_text()
    assert found.count('custom_call_target="tpu_custom_call"') == 2
