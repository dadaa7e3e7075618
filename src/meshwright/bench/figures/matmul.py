"""Square products on every device at once: sizes, element types, contents, and the edges of tiles."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax import lax

from meshwright.bench.devices import CONTENTS, JAX_DTYPES, Bench, Block, Contents
from meshwright.bench.timing import Budget, Call, Timing, rounds_for, time_together
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.units import format_bytes, format_seconds

SIZES = tuple(2**power for power in range(9, 16))
"""512 to 32768."""
FEELER = 128
"""Side of the product that tells how long those of the sweep will take."""
MAX_MEMORY_SHARE = 0.6
CALLS = 5
"""Calls that a size must leave time for: compiling, warming up and three that count."""


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """One product [m,k] x [k,n] of a device. ``share_of_peak`` is the HFU: of the data sheet's dense peak."""

    dtype: str
    m: int
    k: int
    n: int
    contents: Contents
    seconds: Timing
    flops_per_s: float
    share_of_peak: float | None


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A product at or beside a multiple of the tile; ``predicted`` is what filling up to whole tiles leaves of its
    rate."""

    product: Product
    tile: int
    relative: float
    predicted: float


class MatmulPart(msgspec.Struct, frozen=True, kw_only=True):
    """The sweep of each element type, what lies beside whole tiles, and what was left out and why."""

    sweep: tuple[Product, ...] = ()
    edges: tuple[Edge, ...] = ()
    left_out: tuple[str, ...] = ()

    def best(self, dtype: str) -> Product | None:
        """The fastest product of an element type."""
        return max((p for p in self.sweep if p.dtype == dtype), key=lambda p: p.flops_per_s, default=None)


class ContentsPart(msgspec.Struct, frozen=True, kw_only=True):
    """The same product of zeros, ones, uniform and normal numbers, new ones in every repeat, measured in turns."""

    products: tuple[Product, ...] = ()
    left_out: tuple[str, ...] = ()


def product_flops(m: int, k: int, n: int) -> float:
    """2 m k n: a multiplication and an addition for each pair."""
    return 2.0 * m * k * n


def measure_matmul(bench: Bench, budget: Budget) -> MatmulPart:
    """The sweep of the main element type, then tile edges, then the sweeps of the others."""
    sweep, left = _sweep(bench, bench.main_dtype, budget.share(0.45))
    best = max((p.flops_per_s for p in sweep), default=None)
    edges, more = _edges(bench, best, budget.share(0.35))
    left += more
    others = bench.dtypes[1:]
    for number, dtype in enumerate(others):
        found, more = _sweep(bench, dtype, budget.share(1 / (len(others) - number)))
        sweep += found
        left += more
    return MatmulPart(sweep=tuple(sweep), edges=tuple(edges), left_out=tuple(left))


def measure_contents(bench: Bench, budget: Budget, rates: Mapping[str, float | None]) -> ContentsPart:
    """Products in long rows, so that a chip which must save power has the time to do so.

    ``rates`` are those of large products by element type, where they are known, from which the rows get their length.
    """
    products, left = [], []
    dtypes = (bench.main_dtype,) if bench.emulated else bench.dtypes[:2]
    for number, dtype in enumerate(dtypes):
        mine = budget.share(1 / (len(dtypes) - number))
        size = 512 if bench.emulated else 8192
        rate, why = rates.get(dtype), ""
        if rate is None:
            rate, why = _feel(bench, dtype, mine)
        if rate is None:
            left.append(f"{dtype}: {why}")
            continue
        rounds = rounds_for(product_flops(size, size, size) / rate, target_s=min(0.1, mine.left_s / 40))
        calls = {str(what): square_call(bench, dtype, size, rounds, contents=what, fresh=True) for what in CONTENTS}
        times = time_together(calls, mine)
        products += [
            product_of(bench, dtype, size, what, times.found[what].over(rounds))
            for what in CONTENTS
            if what in times.found
        ]
        left += [f"{dtype} of {what}: {why}" for what, why in times.why_not.items()]
    return ContentsPart(products=tuple(products), left_out=tuple(left))


def square_call(
    bench: Bench, dtype: str, size: int, rounds: int, *, contents: Contents = "normal", fresh: bool = False
) -> Call:
    """``rounds`` products of two square blocks, one after the other, on every device."""
    block = Block(shape=(size, size), dtype=dtype, contents=contents)
    return bench.call(repeated_product(dtype, bench.platform, rounds), [block, block], fresh=fresh)


def repeated_product(dtype: str, platform: str, rounds: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Products of the same operands but for one element, which comes from the result before: none can be left out."""

    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        def again(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            a, _out = carry
            out = product(a, b, dtype, platform)
            # Clipped, so that it stays finite however often it is multiplied.
            corner = jnp.clip(out[:1, :1], -1, 1).astype(a.dtype)
            return lax.dynamic_update_slice(a, corner, (0, 0)), out

        return lax.fori_loop(0, rounds, again, (a, jnp.zeros_like(product(a, b, dtype, platform))))[1]

    return body


def product(a: jax.Array, b: jax.Array, dtype: str, platform: str) -> jax.Array:
    """a b as programs compute it in an element type: sums of int8 in int32, of fp8 in 16 bits.

    float32 is at the highest precision where the default one is narrower; "tf32" is that default.
    """
    result = {"int8": jnp.int32, "fp8": jnp.bfloat16}.get(dtype, JAX_DTYPES[dtype])
    exact = dtype == "fp32" and platform != "cpu"
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.matmul(a, b, preferred_element_type=result, precision=precision)


def product_of(bench: Bench, dtype: str, size: int, contents: Contents, seconds: Timing) -> Product:
    """The figures of a square product that took so long."""
    rate = product_flops(size, size, size) / seconds.median_s
    peak = bench.chip.peak_flops.get(dtype)
    return Product(
        dtype=dtype, m=size, k=size, n=size, contents=contents, seconds=seconds, flops_per_s=rate,
        share_of_peak=rate / peak if peak else None,
    )  # fmt: skip


def _feel(bench: Bench, dtype: str, budget: Budget) -> tuple[float | None, str]:
    """FLOP/s of a small product, or why there are none."""
    rounds = 2 if bench.emulated else 64
    times = time_together({"": square_call(bench, dtype, FEELER, rounds)}, budget, max_repeats=3)
    if times.why_not:
        return None, times.why_not[""]
    return product_flops(FEELER, FEELER, FEELER) / times.found[""].over(rounds).median_s, ""


def _sweep(bench: Bench, dtype: str, budget: Budget) -> tuple[list[Product], list[str]]:
    """Growing sizes of one element type, as far as memory and the budget allow."""
    rate, why = _feel(bench, dtype, budget)
    if rate is None:
        return [], [f"{dtype} products: {why}"]
    found: list[Product] = []
    for size in SIZES:
        why = _no_room(bench, dtype, size) or _no_time(size, rate, budget)
        if not why:
            rounds = rounds_for(product_flops(size, size, size) / rate, target_s=min(0.02, budget.left_s / 20))
            times = time_together({"": square_call(bench, dtype, size, rounds)}, budget.share(0.4), max_repeats=10)
            why = times.why_not.get("", "")
        if why:
            return found, [f"{dtype} products of {size} and more: {why}"]
        found.append(product_of(bench, dtype, size, "normal", times.found[""].over(rounds)))
        rate = max(rate, found[-1].flops_per_s)
    return found, []


def _no_room(bench: Bench, dtype: str, size: int) -> str:
    """Why two operands and a result, which exists twice, do not fit; nothing where they do."""
    result = 4 if dtype in ("int8", "fp32", "tf32") else 2
    needed = size * size * (3 * DTYPE_BYTES[dtype] + 2 * result)
    room = bench.memory_bytes * MAX_MEMORY_SHARE
    return f"{format_bytes(needed)} of {format_bytes(room)} that a device has for it" if needed > room else ""


def _no_time(size: int, rate: float, budget: Budget) -> str:
    each = product_flops(size, size, size) / rate
    if CALLS * each <= budget.left_s:
        return ""
    return f"about {format_seconds(each)} each, and {format_seconds(budget.left_s)} are left for them"


# -- tile edges -------------------------------------------------------------------------------------------


def _edges(bench: Bench, rate: float | None, budget: Budget) -> tuple[list[Edge], list[str]]:
    """Sides one below, at and one above a multiple of 128 and of 256, measured in turns."""
    if rate is None:
        return [], ["tile edges: no product was measured"]
    side = _edge_side(bench, rate, budget)
    # A processor's tiles are small: one multiple shows as much as two.
    wholes = ((256, side),) if bench.emulated else ((256, side), (128, side + 128))
    sizes = {n: tile for tile, whole in wholes for n in (whole - 1, whole, whole + 1)}
    rounds = rounds_for(product_flops(side, side, side) / rate, target_s=min(0.02, budget.left_s / 60))
    calls = {str(n): square_call(bench, bench.main_dtype, n, rounds) for n in sizes}
    times = time_together(calls, budget, max_repeats=15)
    products = {
        int(n): product_of(bench, bench.main_dtype, int(n), "normal", found.over(rounds))
        for n, found in times.found.items()
    }
    return _relative(products, sizes), [f"side {n}: {why}" for n, why in times.why_not.items()]


def _edge_side(bench: Bench, rate: float, budget: Budget) -> int:
    """The largest multiple of 256 of a few that leaves time for its neighbours."""
    sides = (512, 1024) if bench.emulated else (1024, 2048, 4096)
    fitting = [n for n in sides if 6 * CALLS * product_flops(n, n, n) / rate < budget.left_s / 2]
    return fitting[-1] if fitting else 256


def _relative(products: Mapping[int, Product], tiles: Mapping[int, int]) -> list[Edge]:
    """Rates relative to that of the multiple of the tile in the middle."""
    edges = []
    for n, found in sorted(products.items()):
        whole = round(n / tiles[n]) * tiles[n]
        if whole in products:
            relative = found.flops_per_s / products[whole].flops_per_s
            edges.append(Edge(product=found, tile=tiles[n], relative=relative, predicted=filled_share(n, tiles[n])))
    return edges


def filled_share(n: int, tile: int) -> float:
    """Share of the work that counts when all three sides are filled up to whole tiles: (n / n filled up)^3."""
    return float((n / (-(-n // tile) * tile)) ** 3)
