"""Kernel-level efficiencies behind the priors of the fit: medians per chip of the tables in data/kernels.

python benchmarks/kernels.py
python benchmarks/kernels.py --tokamax CHECKOUT   # writes the two tables of tokamax anew from a checkout of it
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.spec.chip import chip as find_chip
from meshwright.spec.chip import peak

TABLES = Path(__file__).parent / "data" / "kernels"
MIN_ROWS = 2048
MIN_SIDE = 1024
LARGE_BYTES = 64 * 2**20


def rows(name: str) -> list[dict[str, str]]:
    """The rows of one table."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def medians(name: str, column: str, *, by: str = "chip", keep=lambda row: True) -> dict[str, tuple[float, int]]:  # type: ignore[no-untyped-def]
    """Median of a column per chip, and the number of rows, of the rows that are kept."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows(name):
        if keep(row):
            found[row[by]].append(float(row[column]))
    return {chip: (median(values), len(values)) for chip, values in found.items()}


def large(row: dict[str, str]) -> bool:
    """A product of training: many rows, wide enough."""
    return int(row["m"]) >= MIN_ROWS and min(int(row["n"]), int(row["k"])) >= MIN_SIDE


# -- the tables of tokamax ----------------------------------------------------------------------------------

DEVICES = {
    "nvidia_h100_80gb_hbm3": "h100", "nvidia_b200": "b200", "tpu_v5_lite": "v5e", "tpu_v5": "v5p", "tpu_v6_lite": "v6e",
    "tpu7x": "tpu7x",
}  # fmt: skip
"""Folder of the autotuner -> chip."""

CHIPS_OF_A_DEVICE = {"tpu7x": 0.5}
"""A device of tpu7x is one of the two cores of a chip; other devices are whole chips."""

ATTENTION = ("chip", "kernel", "pass", "dtype", "batch", "length", "heads", "kv_heads", "head_dim", "causal", "seconds")
PRODUCTS = ("chip", "kind", "kernel", "pass", "dtype", "rows", "contracted", "columns", "groups", "copied", "seconds")

COPIED_WEIGHTS = {"h100": "NK", "b200": "KN"}
"""Layout of a group's weights that Mosaic's grouped products on that chip copy into the other one first
(tokamax/_src/ops/ragged_dot: pallas_mosaic_gpu.py and pallas_mosaic_gpu_kernel_sm100.py, ``rhs.mT``)."""

Row = dict[str, Any]


def tokamax_rows(checkout: Path) -> tuple[list[Row], list[Row]]:
    """Rows of attention and of products: the fastest setting of every kernel and shape, by its median time.

    Left out: attention with a bias, a mask of its own, a soft-cap or unequal lengths; products of other dtypes than
    bf16 with bf16, or f32 activations with bf16 weights.
    """
    found: tuple[dict[tuple[Any, ...], Row], dict[tuple[Any, ...], Row]] = ({}, {})
    for path in sorted((checkout / "tokamax/data/autotuning").glob("*/*.json")):
        kernel = path.stem.removesuffix("_vjp")
        given = {"chip": DEVICES[path.parent.name], "kernel": kernel}
        given["pass"] = "backward" if path.stem.endswith("_vjp") else "forward"
        for text, settings in json.loads(path.read_text()).items():
            times = [median(one["evaluation_times_ms"]) for one in settings.values() if one.get("evaluation_times_ms")]
            shape = json.loads(text)
            for table, made in zip(found, (_attention(shape), _product(shape, given)), strict=True):
                if times and made:
                    row = given | made
                    key = tuple(value for name, value in row.items() if name != "copied")
                    seconds = min(times) / 1e3
                    if key not in table or table[key]["seconds"] > seconds:
                        table[key] = row | {"seconds": seconds}
    return list(found[0].values()), list(found[1].values())


def _dims(text: str) -> tuple[str, list[int]]:
    dtype, dims = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()  # type: ignore[union-attr]
    return dtype, [int(size) for size in dims.split(",") if size]


def _attention(shape: Row) -> Row | None:
    mask = shape["mask"] if "q" in shape else None
    if not mask or any(shape[key] for key in ("bias", "logits_soft_cap", "dropout_mask", "paging_info")):
        return None
    if any(value for key, value in mask.items() if key != "is_causal"):
        return None
    dtype, (batch, length, heads, head_dim) = _dims(shape["q"])
    _, (_, kv_length, kv_heads, _) = _dims(shape["k"])
    if kv_length != length or dtype != "bf16":
        return None
    causal = int(mask["is_causal"])
    return dict(zip(ATTENTION[3:-1], (dtype, batch, length, heads, kv_heads, head_dim, causal), strict=True))


def _product(shape: Row, given: Row) -> Row | None:
    """The sizes of a product. Groups without rows do not count; ``copied`` are the groups whose weights software copies
    first (`COPIED_WEIGHTS`), or 1 for the result of a gated unit: XLA on TPUs copies it unless its rows have a leading
    dim of one."""
    kernel, groups, copied = given["kernel"], 1, 0
    if "ragged_dot" in kernel:
        (dtype, left), (right_dtype, right) = _dims(shape["lhs"]), _dims(shape["rhs"])
        if len(right) != 3:  # the gradient of the weights
            return None
        _, (summed,) = shape["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0]
        sizes, columns, kind = shape["group_sizes"], right[3 - summed], "grouped"
        groups = sum(size > 0 for size in sizes) if isinstance(sizes, list) else right[0]
        if "mosaic_gpu" in kernel and COPIED_WEIGHTS[given["chip"]] == ("NK" if summed == 2 else "KN"):
            copied = right[0]
    elif "gated_linear_unit" in kernel:
        (dtype, left), (right_dtype, right) = _dims(shape["x"]), _dims(shape["weights"])
        columns, kind = right[2], "gated"
        copied = int(kernel == "gated_linear_unit" and given["chip"].startswith(("v", "tpu")) and len(left) < 4)
    elif "cross_entropy" in kernel:
        (dtype, left), (right_dtype, right) = _dims(shape["x"]), _dims(shape["w"])
        columns, kind = right[1], "loss"
    else:
        return None
    if len(left) < 2 or right_dtype != "bf16" or dtype not in ("bf16", "f32"):
        return None
    sizes = (dtype, prod(left[:-1]), left[-1], columns, groups, copied)
    return {"kind": kind} | dict(zip(PRODUCTS[4:-1], sizes, strict=True))


def write_table(name: str, columns: tuple[str, ...], found: list[Row]) -> None:
    """Writes a table of tokamax, in the order of its columns."""
    with (TABLES / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        found = sorted(found, key=lambda row: [row[column] for column in columns])
        writer.writerows(row | {"seconds": f"{row['seconds']:.6g}"} for row in found)


def shares() -> Iterator[tuple[str, str, float, int]]:
    """Yields chip, kernel and pass, median share of the peak and number of rows: attention over 4,096 positions or more
    with heads of 128, which is not causal; products of 4,096 rows or more, 64 a group, and sides of 1,024 or more."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows("tokamax_attention"):
        b, t, h, d = (int(row[key]) for key in ("batch", "length", "heads", "head_dim"))
        if t >= 4096 and d == 128 and row["causal"] == "0":
            flops = 4 * b * t * t * h * d * (2.5 if row["pass"] == "backward" else 1)
            found[row["chip"], f"{row['kernel']}, {row['pass']}"].append(flops / float(row["seconds"]))
    for row in rows("tokamax_products"):
        m, k, n, groups = (int(row[key]) for key in ("rows", "contracted", "columns", "groups"))
        if m >= max(4096, 64 * groups) and min(k, n) >= 1024:
            flops = 2 * m * k * n * (2 if row["kind"] == "gated" else 1) * (3 if row["pass"] == "backward" else 1)
            found[row["chip"], f"{row['kernel']}, {row['pass']}"].append(flops / float(row["seconds"]))
    for (chip, name), rates in sorted(found.items()):
        yield chip, name, median(rates) / (peak(find_chip(chip), "bf16") * CHIPS_OF_A_DEVICE.get(chip, 1)), len(rates)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokamax", type=Path, help="a checkout of openxla/tokamax")
    given = parser.parse_args()
    if given.tokamax:
        attention, products = tokamax_rows(given.tokamax)
        write_table("tokamax_attention", ATTENTION, attention)
        write_table("tokamax_products", PRODUCTS, products)
        print(f"{len(attention)} rows of attention, {len(products)} rows of products")
    tables = {
        f"bf16 products, M >= {MIN_ROWS}, N and K >= {MIN_SIDE}: share of the peak": medians(
            "gemm_bf16", "eff", keep=large
        ),
        "fp8 products of the same sizes: share of the fp8 peak": medians("gemm_fp8", "eff", keep=large),
        "causal prefill attention over 4096 positions or more: share of the bf16 peak": medians(
            "attention_prefill_bf16", "eff_causal", keep=lambda row: int(row["isl"]) >= 4096
        ),
        f"AllGather over 8 GPUs of {LARGE_BYTES >> 20} MiB or more: share of NVLink one way": medians(
            "collectives_nvlink",
            "of_datasheet",
            keep=lambda r: r["op_name"] == "all_gather" and r["num_gpus"] == "8" and float(r["bytes"]) >= LARGE_BYTES,
        ),
    }
    for title, found in tables.items():
        print(title)
        for chip, (value, count) in found.items():
            print(f"  {chip:12} {value:.2f}  ({count} rows)")
    print("kernels of tokamax on large shapes: share of the bf16 peak")
    for chip, name, share, count in shares():
        print(f"  {chip:14} {name:60} {share:.2f}  ({count} rows)")


if __name__ == "__main__":
    main()
