"""Kernel-level efficiencies behind the priors of the fit: medians per chip of the tables in data/kernels.

python benchmarks/kernels.py
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

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


def main() -> None:
    """Print the medians."""
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


if __name__ == "__main__":
    main()
