"""Pages of a cache go to the host and come back, at other places, with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.parallel.generation.host_pages import AT_ONCE, HostPages
from meshwright.parallel.generation.program_store import ProgramStore

NUM_PAGES, LAYERS, PAGE_LEN, HEADS, WIDTH = 29, 3, 4, 4, 2


class Page:
    copy = None


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint8).reshape(*array.shape[:-1], -1)


def random_cache(rng, *, layers: bool, split: bool):
    """Arrays of the dtypes that caches have on CPUs, with every pattern of bits, also those of NaN: of bfloat16 the
    bits."""
    mesh = jax.make_mesh((4 if split else 1,), ("tensor",))

    def array(dtype, *dims):
        size = jnp.dtype(dtype).itemsize
        values = rng.integers(0, 256, (*dims[:-1], dims[-1] * size), np.uint8).view(dtype)
        spec = PartitionSpec(*[None] * (len(dims) - 2), "tensor", None)
        return jax.device_put(values, NamedSharding(mesh, spec))

    def cache(dtype, width):
        if layers:
            return tuple(array(dtype, NUM_PAGES, PAGE_LEN, HEADS, width) for _ in range(LAYERS))
        return array(dtype, LAYERS, NUM_PAGES, PAGE_LEN, HEADS, width)

    return {"k": cache(np.float32, WIDTH), "v": cache(np.uint16, WIDTH), "scale": cache(np.int8, 1)}


def pages_of(cache, numbers, *, layers: bool) -> list[np.ndarray]:
    """The bits of these pages, of each array."""
    return [bits(one)[numbers] if layers else bits(one)[:, numbers] for one in jax.tree.leaves(cache)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layers", [True, False])
def test_pages_keep_their_bits(layers, split):
    rng = np.random.default_rng(3)
    cache = random_cache(rng, layers=layers, split=split)
    host = HostPages(cache, ProgramStore(None, None))
    assert host.page_bytes * NUM_PAGES == sum(array.nbytes for array in jax.tree.leaves(cache))
    before = jax.tree.map(np.asarray, cache)
    order = rng.permutation(NUM_PAGES)
    leaving = {Page(): int(page) for page in order[: AT_ONCE + 3]}
    cache = host.move(cache, leaving, {})
    nodes = list(leaving)
    assert all(node.copy is not None for node in nodes[:AT_ONCE])
    cache = host.move(cache, {}, {})
    assert all(sum(one.nbytes for one in node.copy) == host.page_bytes for node in nodes)
    assert all(one.base is None for node in nodes for one in node.copy)  # a page that is dropped frees its memory

    places = [int(page) for page in rng.permutation(NUM_PAGES)[: len(nodes)]]
    cache = host.move(cache, {}, dict(zip(nodes, places, strict=True)))
    assert all(node.copy is None for node in nodes)
    rest = sorted(set(range(NUM_PAGES)) - set(places))
    for numbers, old in ((places, list(leaving.values())), (rest, rest)):
        found, expected = (pages_of(*each, layers=layers) for each in ((cache, numbers), (before, old)))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_warm_up_compiles_both_programs():
    programs = ProgramStore(None, None)
    host = HostPages({"k": jnp.zeros((2, 3, 4))}, programs)
    host.warm_up()
    assert programs.num_compiled == 2


def test_a_page_may_leave_and_come_back_at_once():
    rng = np.random.default_rng(4)
    cache = random_cache(rng, layers=True, split=False)
    host, one, other = HostPages(cache, ProgramStore(None, None)), Page(), Page()
    before = jax.tree.map(np.asarray, cache)
    cache = host.move(cache, {one: 5, other: 6}, {one: 6})
    assert one.copy is None
    for found, expected in zip(pages_of(cache, [6], layers=True), pages_of(before, [5], layers=True), strict=True):
        np.testing.assert_array_equal(found, expected)
    cache = host.move(cache, {}, {other: 0})
    for found, expected in zip(pages_of(cache, [0], layers=True), pages_of(before, [6], layers=True), strict=True):
        np.testing.assert_array_equal(found, expected)
