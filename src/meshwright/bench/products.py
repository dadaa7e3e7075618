"""Benchmark parts for matrix products: sizes, partial tiles, contents, MLPs, attention and layers."""

from meshwright.algebra.ops.attention import keys_per_query
from meshwright.bench import results
from meshwright.bench.devices import Bench, Runner
from meshwright.bench.fit import fit_knee
from meshwright.bench.timing import rounds_for
from meshwright.bench.workloads import (
    attention_workload,
    layer_flops,
    layer_workload,
    mlp_workload,
    product_flops,
    product_workload,
)
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.formulas.roofline import critical_batch

SIZES = tuple(2**power for power in range(9, 16))
"""Sides of the square products, 512 to 32768."""
PROBE_SIDE = 128
"""Side of the product whose rate sets the rounds of the sweep's first products."""
MAX_MEMORY_SHARE = 0.6
CALLS = 5
"""Calls that must fit into the seconds left: compiling, warming up and three that count."""
CONTENTS: tuple[results.Contents, ...] = ("zeros", "ones", "uniform", "normal")


def measure_matmul(runner: Runner) -> results.MatmulPart:
    """Measures the sizes of the main element type, then partial tiles, then the sizes of other element types."""
    main_dtype, *other_dtypes = runner.bench.dtypes
    sweep_products = _sweep(runner.share(0.45), main_dtype)
    edges = _edges(runner.share(0.35), max((p.flops_per_s for p in sweep_products), default=None))
    for dtype, dtype_runner in runner.each(other_dtypes):
        sweep_products += _sweep(dtype_runner, dtype)
    return results.MatmulPart(sweep=tuple(sweep_products), edges=tuple(edges))


def _sweep(runner: Runner, dtype: str) -> list[results.Product]:
    """Measures increasing sizes of one element type, up to what memory and budget allow."""
    products: list[results.Product] = []
    flops_per_s = _probed_rate(runner, dtype, f"{dtype} products")
    if flops_per_s is None:
        return products
    for side in SIZES:
        product_s, left_out_text = product_flops(side, side, side) / flops_per_s, f"{dtype} products of {side} and more"
        reason = _too_large(runner, dtype, side, product_s)
        if reason:
            runner.left_out.append(f"{left_out_text}: {reason}")
            break
        workload = product_workload(
            runner.bench, dtype, side, rounds_for(product_s, target_s=min(0.02, runner.left_s / 20))
        )
        timing = runner.share(0.4).time_one(workload, left_out_text, max_repeats=10)
        if not timing:
            break
        products.append(_product(runner.bench, dtype, side, timing))
        flops_per_s = max(flops_per_s, products[-1].flops_per_s)
    return products


def _probed_rate(runner: Runner, dtype: str, left_out_text: str) -> float | None:
    """Returns the FLOP/s of a small product; None if it could not be timed."""
    workload = product_workload(runner.bench, dtype, PROBE_SIDE, runner.bench.sizes.probe_rounds)
    timing = runner.time_one(workload, left_out_text, max_repeats=3)
    return workload.work / timing.median_s if timing else None


def _too_large(runner: Runner, dtype: str, side: int, product_s: float) -> str:
    """Returns why a product of this side needs too much memory or time; "" if it fits both."""
    result_bytes = 4 if dtype in ("int8", "fp32", "tf32") else 2
    needed_bytes = side * side * (3 * DTYPE_BYTES[dtype] + 2 * result_bytes)
    room_bytes, left_s = runner.bench.memory_bytes * MAX_MEMORY_SHARE, runner.left_s
    if needed_bytes > room_bytes:
        return f"needs {format_bytes(needed_bytes)}, a device has {format_bytes(room_bytes)} for it"
    if product_s * CALLS > left_s:
        return f"takes about {format_seconds(product_s)}, {CALLS} times, and {format_seconds(left_s)} are left"
    return ""


def _product(
    bench: Bench, dtype: str, side: int, timing: results.Timing, contents: results.Contents = "normal"
) -> results.Product:
    flops_per_s = product_flops(side, side, side) / timing.median_s
    return results.Product(
        dtype=dtype, m=side, k=side, n=side, contents=contents, seconds=timing, flops_per_s=flops_per_s,
        share_of_peak=bench.share_of_peak(flops_per_s, dtype),
    )  # fmt: skip


def _edges(runner: Runner, flops_per_s: float | None) -> list[results.Edge]:
    """Measures products of sides n - 1, n and n + 1 in alternation, with n a multiple of the tile."""
    if flops_per_s is None:
        runner.left_out.append("tile edges: no product was measured")
        return []
    bench, dtype = runner.bench, runner.bench.main_dtype
    fitting_sides = [
        n for n in bench.sizes.edge_sides
        if 6 * CALLS * product_flops(n, n, n) / flops_per_s < runner.left_s / 2
    ]  # fmt: skip
    side = fitting_sides[-1] if fitting_sides else 256
    tiles_and_sides = [(tile, side + 256 - tile) for tile in bench.sizes.tiles]
    tile_of = {n: (tile, whole_n) for tile, whole_n in tiles_and_sides for n in (whole_n - 1, whole_n, whole_n + 1)}
    rounds = rounds_for(product_flops(side, side, side) / flops_per_s, target_s=min(0.02, runner.left_s / 60))
    timings = runner.time({n: product_workload(bench, dtype, n, rounds) for n in tile_of}, "side {}", max_repeats=15)
    product_by_side = {n: _product(bench, dtype, n, timing) for n, timing in timings.items()}
    return [
        results.Edge(
            product=product_by_side[n],
            tile=tile,
            relative=product_by_side[n].flops_per_s / product_by_side[whole_n].flops_per_s,
            predicted=filled_share(n, tile),
        )
        for n, (tile, whole_n) in sorted(tile_of.items())
        if n in product_by_side and whole_n in product_by_side
    ]


def filled_share(n: int, tile: int) -> float:
    """Returns the share of useful work when all three sides are padded to whole tiles: (n / padded n)^3."""
    return float((n / (-(-n // tile) * tile)) ** 3)


def measure_contents(runner: Runner) -> results.ContentsPart:
    """Measures products by `CONTENTS`, many per call so that a chip at its power limit has time to slow down."""
    bench, products, side = runner.bench, [], runner.bench.sizes.contents
    for dtype, dtype_runner in runner.each(bench.dtypes[: bench.sizes.contents_dtypes]):
        rate = runner.product_rate(dtype) or _probed_rate(dtype_runner, dtype, dtype)
        if rate:
            rounds = rounds_for(product_flops(side, side, side) / rate, target_s=min(0.1, dtype_runner.left_s / 40))
            workload_by_fill = {fill: product_workload(bench, dtype, side, rounds, contents=fill) for fill in CONTENTS}
            timings = dtype_runner.time(workload_by_fill, f"{dtype} of {{}}")
            products += [_product(bench, dtype, side, timing, fill) for fill, timing in timings.items()]
    return results.ContentsPart(products=tuple(products))


def measure_mlp(runner: Runner) -> results.MlpPart:
    """Measures gated MLPs of every shape forward and backward, smallest first."""
    dtype, mlps = runner.bench.main_dtype, []
    best = (runner.found.get("matmul") or results.MatmulPart()).best(dtype)
    for shape, mlp_runner in runner.each(runner.bench.sizes.mlps):
        workload = mlp_workload(shape, dtype)
        timing = mlp_runner.time_one(workload, f"MLP of {' x '.join(map(str, shape))}")
        if timing:
            rate = workload.work / timing.median_s
            mlps.append(
                results.Mlp(
                    dtype=dtype, tokens=shape[0], d_model=shape[1], d_ff=shape[2], seconds=timing, flops_per_s=rate,
                    mfu=runner.bench.share_of_peak(rate, dtype), of_matmul=rate / best.flops_per_s if best else None,
                )
            )  # fmt: skip
    return results.MlpPart(mlps=tuple(mlps))


def measure_attention(runner: Runner) -> results.AttentionPart:
    """Measures attention at each sequence length: forward, and forward plus backward, in alternation."""
    bench, dtype, attention_times = runner.bench, runner.bench.main_dtype, []
    for shape, attention_runner in runner.each(bench.sizes.attention):
        programs = {is_both: attention_workload(shape, dtype, both=is_both) for is_both in (False, True)}
        timings = attention_runner.time(programs, f"attention over {shape[1]} positions", max_repeats=15)
        if len(timings) == len(programs):
            # the share of all (query, key) pairs that attention computes
            pair_share = float(keys_per_query(shape[1], causal=not bench.emulated)) / shape[1]
            forward_rate, both_rate = (programs[key].work * pair_share / timings[key].median_s for key in (False, True))
            attention_times.append(
                results.AttentionTime(
                    batch=shape[0], length=shape[1], num_heads=shape[2], num_kv_heads=shape[3], head_dim=shape[4],
                    forward=timings[False], both=timings[True], forward_flops_per_s=forward_rate,
                    both_flops_per_s=both_rate, share_of_peak=bench.share_of_peak(both_rate, dtype),
                )
            )  # fmt: skip
    return results.AttentionPart(dtype=dtype, times=tuple(attention_times))


def measure_batch(runner: Runner) -> results.BatchPart:
    """Measures a layer with doubling batches; its time's knee is compared with the predicted critical batch."""
    bench, dtype = runner.bench, runner.bench.main_dtype
    sizes, batch_sizes = bench.sizes.layer, bench.sizes.batches
    layer_times: list[results.LayerTime] = []
    for index, tokens in enumerate(batch_sizes):
        workload, batch_runner = layer_workload(sizes, tokens, dtype), runner.share(2 / (len(batch_sizes) - index + 1))
        timing = batch_runner.time_one(workload, f"batches of {tokens} tokens and more", max_repeats=10)
        if not timing:
            break
        layer_times.append(
            results.LayerTime(
                tokens=tokens,
                seconds=timing,
                tokens_per_us=tokens / timing.median_s * 1e-6,
                flops_per_s=workload.work / timing.median_s,
            )
        )
    copy_part: results.CopyPart = runner.found.get("copy") or results.CopyPart()
    weights_copy = copy_part.of_size(layer_flops(sizes, 1) / 2 * DTYPE_BYTES[dtype])
    chip_rates = runner.product_rate(dtype), weights_copy.bytes_per_s if weights_copy else bench.chip.hbm_bytes_per_s
    return results.BatchPart(
        sizes=dict(sizes),
        dtype=dtype,
        layers=tuple(layer_times),
        knee=fit_knee([layer.tokens for layer in layer_times], [layer.seconds.median_s for layer in layer_times]),
        predicted_knee=critical_batch(*chip_rates, weight_bytes=DTYPE_BYTES[dtype]) if all(chip_rates) else None,
    )
