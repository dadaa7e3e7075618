"""The search over shardings of a chain: equal to trying everything, and the book's exercises 3.5 and 3.7."""

import itertools
from collections import defaultdict

import pytest

from meshwright.algebra.einsum import local_product, reshard
from meshwright.algebra.notation import ShardedArray, local_elements
from meshwright.algebra.steps import Step
from meshwright.calculators.sharding.chain import parse_chain, shardings
from meshwright.calculators.sharding.chain_search import search_chain
from meshwright.calculators.sharding.einsum_cost import all_ways, einsum_rates, price_einsum
from meshwright.core.errors import CannotRunError
from meshwright.spec.cluster import parse_cluster

GB = 1e9
UNEVEN = (("A[I,J] * B[J,K] -> C[I,K]",), {"I": 6, "J": 2, "K": 3}, {"X": 2, "Y": 3})
TWO = (("A[I,J] * B[J,K] -> C[I,K]", "D[K,L] * C[I,K] -> E[I,L]"), {"I": 8, "J": 16, "K": 4, "L": 32}, {"X": 4})


def rates_on(name, mesh):
    return einsum_rates(parse_cluster(name), mesh)


def every_way(chain, stored):
    """Every list of steps for arrays stored so: each product in every layout, its sum scattered or made whole."""
    per_product = []
    carried = stored[next(iter(chain.choices))]
    for one in chain.products:
        whole = ShardedArray("layout", one.dims, ((),) * len(one.dims))
        found = []
        for layout in shardings(whole, chain.dims, chain.mesh):
            axes = dict(zip(layout.dims, layout.axes, strict=True))
            left, right = carried.resharded(axes), stored[one.other.name].resharded(axes)
            operands = (right, left) if one.swapped else (left, right)
            result = local_product(*operands, one.out)
            before = (*reshard(carried, left), *reshard(stored[one.other.name], right))
            head = (*before, Step(op="einsum", inputs=operands, result=result))
            out = stored[one.out.name]
            found.append((*head, *reshard(result, out)))
            summed = result.replace(unreduced=())
            found.append((*head, *reshard(result, summed), *reshard(summed, out)))
        per_product.append(found)
        carried = stored[one.out.name]
    return [tuple(itertools.chain(*parts)) for parts in itertools.product(*per_product)]


def peak_bytes(chain, stored, steps):
    """Inputs all the time, and every other array from the step that makes it to the last that reads it."""
    inputs = {stored[name] for name in chain.inputs}
    last = {array: number for number, step in enumerate(steps) for array in (*step.inputs, step.result)}
    made = {}
    for number, step in enumerate(steps):
        made.setdefault(step.result, number)

    def size(array):
        return 2 * local_elements(array, chain.dims, chain.mesh)

    alive = [
        sum(size(a) for a, start in made.items() if start <= number <= last[a] and a not in inputs)
        for number in range(len(steps))
    ]
    return sum(size(a) for a in inputs) + max(alive)


def try_everything(chain, rates):
    """(time, memory) of every way of every assignment, by its shardings with the order of axes left out."""
    found = defaultdict(list)
    known = {}

    def seconds(step):
        if step not in known:
            known[step] = price_einsum((step,), chain.dims, chain.mesh, rates)[0].time_s
        return known[step]

    for arrays in itertools.product(*(chain.choices[name] for name in chain.choices)):
        stored = dict(zip(chain.choices, arrays, strict=True))
        key = tuple(tuple(frozenset(axes) for axes in a.axes) for a in arrays)
        for steps in every_way(chain, stored):
            found[key].append((sum(map(seconds, steps)), peak_bytes(chain, stored, steps)))
    return found


@pytest.mark.parametrize(("products", "dims", "mesh"), [UNEVEN, TWO])
def test_the_search_finds_what_trying_everything_finds(products, dims, mesh):
    chain = parse_chain(products, dims=dims, mesh=mesh)
    rates = rates_on("v5e:4x4" if len(mesh) > 1 else "v5e:4x1", mesh)
    everything = try_everything(chain, rates)
    least = min(memory for ways in everything.values() for _, memory in ways)
    largest = max(memory for ways in everything.values() for _, memory in ways)
    assert least < largest / 2
    for limit in (least, 1.25 * least, 1.5 * least, largest):
        fit = [min((w for w in ways if w[1] <= limit), default=None) for ways in everything.values()]
        wanted = sorted(way for way in fit if way is not None)[:7]
        found = search_chain(chain, rates, memory_bytes=limit, top=7)
        assert [one.time_s for one in found] == pytest.approx([time for time, _ in wanted], rel=1e-9)
        assert found[0].memory_bytes == min(m for t, m in wanted if t <= wanted[0][0] * (1 + 1e-9))
        for one in found:
            assert one.memory_bytes == peak_bytes(chain, one.arrays, one.steps) <= limit
            assert one.time_s == pytest.approx(sum(p.time_s for p in one.prices))
    with pytest.raises(CannotRunError, match="the least is"):
        search_chain(chain, rates, memory_bytes=least - 1)


def test_no_way_of_one_product_beats_it():
    """The ways that the algebra lists for given shardings are among those searched."""
    for text in ("A[I_X,J_Y] * B[J_Y,K] -> C[I_X,K]", "A[I_X,J] * B[J_X,K_Y] -> C[I_X,K_Y]"):
        dims, mesh = {"I": 512, "J": 2048, "K": 1024}, {"X": 4, "Y": 4}
        chain, rates = parse_chain((text,), dims=dims, mesh=mesh), rates_on("v5e:4x4", mesh)
        stored = [choices[0] for choices in chain.choices.values()]
        totals = [sum(p.time_s for p in price_einsum(steps, dims, mesh, rates)) for steps in all_ways(*stored).values()]
        (best,) = search_chain(chain, rates, memory_bytes=16 * GB)
        assert best.time_s <= min(totals) * (1 + 1e-12)


def test_two_matrices_of_a_block_in_300_mb():
    """Exercise 3.7: both matrices split over F, the hidden array too, and one sum scattered at the end."""
    dims, mesh = {"B": 128, "D": 8192, "F": 32768}, {"X": 2, "Y": 2}
    products = ("Win[D,F] * x[B,D] -> Tmp[B,F]", "Wout[F,D] * Tmp[B,F] -> Out[B,D]")
    chain, rates = parse_chain(products, dims=dims, mesh=mesh), rates_on("v5e:2x2", mesh)
    (best,) = search_chain(chain, rates, memory_bytes=300e6)
    arrays = {name: str(array) for name, array in best.arrays.items()}
    assert arrays["Win"] == "Win[D, F_XY]"
    assert arrays["Wout"] == "Wout[F_XY, D]"
    assert arrays["Tmp"] == "Tmp[B, F_XY]"
    assert [step.op for step in best.steps] == ["einsum", "einsum", "reduce_scatter"]
    assert best.communication_s == pytest.approx(2 * 128 * 8192 * 3 / 4 / (2 * 45e9))
    assert best.bound_by == "hbm"
    assert 2 * 2 * 8192 * 32768 / 4 < best.memory_bytes <= 300e6
    assert sum(p.flops for p in best.prices) == 2 * 2 * 128 * 8192 * 32768 / 4


def test_lowest_latency_of_one_product():
    """Exercise 3.5: on 64 chips a product needs no communication at all, if copies of the inputs may be held."""
    dims, mesh = {"B": 4096, "D": 8192, "F": 8192}, {"X": 4, "Y": 4, "Z": 4}
    chain = parse_chain(("A[B,D] * W[D,F] -> C[B,F]",), dims=dims, mesh=mesh)
    rates = rates_on("v5p:4x4x4", mesh)
    (best,) = search_chain(chain, rates, memory_bytes=95 * GB)
    assert best.communication_s == 0
    assert best.time_s == pytest.approx(2 * 4096 * 8192 * 8192 / 64 / 459e12)
    whole = parse_chain(("A[B,D] * W[D,F] -> C[B,F]",), dims=dims, mesh=mesh, fixed=["C[B,F]"])
    (gathered,) = search_chain(whole, rates, memory_bytes=95 * GB)
    assert gathered.communication_s > 0


def test_the_time_grows_as_memory_shrinks_along_a_long_chain():
    products = [f"h{i}[B,D{i}] * W{i}[D{i},D{i + 1}] -> h{i + 1}[B,D{i + 1}]" for i in range(8)]
    dims = {"B": 4096, **{f"D{i}": 8192 * (1 + 3 * (i % 2)) for i in range(9)}}
    mesh = {"X": 4, "Y": 4}
    chain, rates = parse_chain(products, dims=dims, mesh=mesh), rates_on("v5e:4x4", mesh)
    times = [search_chain(chain, rates, memory_bytes=limit)[0].time_s for limit in (16e9, 3e9, 1e9, 0.4e9)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(8 * 2 * 4096 * 8192 * 32768 / 16 / 197e12)
    assert times[-1] > times[0]
