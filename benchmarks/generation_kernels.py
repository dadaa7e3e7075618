"""Writes the tables of the kernels of token generation in data/kernels from a checkout of ai-dynamo/aiconfigurator.

python benchmarks/generation_kernels.py CHECKOUT   # a git directory
"""

import csv
import io
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

TABLES = Path(__file__).parent / "data" / "kernels"
FOLDER = "aic-core/src/aiconfigurator_core/systems/data"
CHIPS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "b300_sxm", "gb300")
SOFTWARE = {"trtllm": ("1.3.0rc20", "1.0.0"), "vllm": ("0.24.0", "0.14.0"), "sglang": ("0.5.14", "0.5.10")}
"""Version on all chips but a100, and on a100."""

WORDS = {"bfloat16": "bf16", "w4a16_mxfp4": "mxfp4"}
FEW = (1, 8, 32, 128, 512)
STEPS = (255, 1023, 4095, 16383, 65535)
MATRICES = (
    (2560, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (1024, 8192), (6144, 4096), (4096, 4096), (4096, 12288),
    (5120, 5120), (16384, 5120), (1536, 7168), (7168, 2048), (10240, 8192), (2048, 2048),
)  # fmt: skip
"""Columns and K of the products: projections of dense models over 1 to 8 GPUs, and of DeepSeek-V3."""

HEADS = ((8, 1, 128, 0), (16, 2, 128, 0), (32, 8, 128, 0), (64, 8, 128, 0), (32, 32, 128, 0), (64, 8, 64, 0),
         (64, 8, 64, 128), (8, 1, 64, 0))  # fmt: skip
"""Heads, kv heads, width and window."""

EXPERTS = ((7168, 2048, 8, 256), (7168, 2048, 8, 384), (2880, 2880, 4, 128), (4096, 1536, 8, 128), (2048, 768, 8, 128),
           (4096, 14336, 2, 8))  # fmt: skip
"""Width, width of an expert, experts of a token, experts: DeepSeek-V3, Kimi K2, gpt-oss-120b, two of Qwen3, Mixtral."""

DRAWS = 200

Row = dict[str, Any]


class Made(NamedTuple):
    """A table to write: where its rows come from, which are read, and what becomes of one (None: it is left out)."""

    name: str
    source: str
    filters: list[tuple[str, str, Any]]
    row: Callable[[Row], Row | None]


def product(row: Row) -> Row | None:
    dtype = WORDS.get(row["gemm_dtype"], row["gemm_dtype"])
    return {"dtype": dtype, "m": row["m"], "n": row["n"], "k": row["k"]} if (row["n"], row["k"]) in MATRICES else None


def attention(row: Row) -> Row | None:
    kv_heads = row["num_key_value_heads"] or row["num_heads"]
    shape = (row["num_heads"], kv_heads, row["head_dim"], row.get("window_size", 0))
    sizes = dict(zip(("heads", "kv_heads", "head_dim", "window"), shape, strict=True))
    return latent(row) | sizes if shape in HEADS else None


def latent(row: Row) -> Row:
    bits = {"bfloat16": 16, "fp8": 8}[row["kv_cache_dtype"]]
    return {"bits": bits, "batch": row["batch_size"], "length": row["step"] + 1, "heads": row["num_heads"]}


def expert(row: Row) -> Row | None:
    """Experts are split by width or by number, or neither. Which expert a token alone chooses is left to chance: such
    rows count where a device has all."""
    sizes = {"hidden": "hidden_size", "inner": "inter_size", "chosen": "topk", "experts": "num_experts"}
    found = {name: row[column] for name, column in sizes.items()}
    split, even = (row["moe_tp_size"], row["moe_ep_size"]), row["distribution"] == "balanced"
    wanted = ((8, 1), (1, 8)) if even else ((1, 1), (8, 1), (1, 8), (4, 1), (1, 4))
    alone = row["num_tokens"] == 1 and split[1] > 1
    if tuple(found.values()) not in EXPERTS or split not in wanted or alone:
        return None
    rows, met = loads(row["num_tokens"], row["topk"], row["num_experts"], split[1], even)
    found |= {"inner": row["inter_size"] // split[0], "ranks": split[1], "routing": row["distribution"]}
    dtype = WORDS.get(row["moe_dtype"], row["moe_dtype"])
    return {"dtype": dtype, "tokens": row["num_tokens"]} | found | {"rows": f"{rows:.4g}", "met": f"{met:.4g}"}


DRAWN: dict[tuple[int, ...], tuple[float, float]] = {}


def loads(*key: int) -> tuple[float, float]:
    """Returns the rows of a device and its experts that any token chooses, the mean of draws by the tables' collector
    (collector/helper.py): loads follow a power law, are rounded and corrected, and the busiest device counts."""
    if key not in DRAWN:
        tokens, chosen, num_experts, ranks, even = key
        random = np.random.default_rng(zlib.crc32(repr(key).encode()))
        drawn = [draw(tokens, chosen, num_experts, ranks, random) for _ in range(0 if even else DRAWS)]
        drawn = drawn or [(tokens * chosen / ranks, min(num_experts, tokens * chosen) / ranks)]
        rows, met = np.mean(drawn, axis=0)
        DRAWN[key] = (rows, met)
    return DRAWN[key]


def draw(tokens: int, chosen: int, num_experts: int, ranks: int, random: np.random.Generator) -> tuple[float, float]:
    low, high = (1, tokens * 0.8) if tokens * chosen > num_experts else (0.01, 2)
    least, most = low**-0.01, high**-0.01
    drawn = ((most - least) * random.random(num_experts) + least) ** -100
    counts = np.minimum(np.round(drawn / drawn.sum() * tokens * chosen), tokens).reshape(ranks, -1)
    rank, missing = 0, tokens * chosen - counts.sum()
    while missing:
        one = counts[rank % ranks]
        step, at = (1, one.argmin()) if missing > 0 else (-1, one.argmax())
        if 0 <= one[at] + step <= tokens:
            one[at] += step
            missing -= step
        rank += 1
    busiest = counts[counts.sum(axis=1).argmax()]
    return float(busiest.sum()), float((busiest > 0).sum())


def reduce(row: Row) -> Row | None:
    captured = row.get("backend", "graph").endswith("graph")
    return {"gpus": row["num_gpus"], "bytes": row["message_size"]} if captured else None


CACHES = [("batch_size", "in", FEW), ("step", "in", STEPS)]
MADE = (
    Made("generation_products", "gemm/{}/gemm_perf",
         [("m", "in", (1, 4, 16, 64, 128, 256, 512)), ("gemm_dtype", "in", ("bfloat16", "fp8", "fp8_block", "nvfp4"))],
         product),
    Made("generation_attention", "attention/{}/generation_attention_perf", CACHES, attention),
    Made("generation_latent_attention", "mla/{}/generation_mla_perf", [*CACHES, ("num_heads", "in", (16, 64, 128))],
         latent),
    Made("generation_experts", "moe/{}/moe_perf",
         [("num_tokens", "in", FEW), ("moe_dtype", "in", ("bfloat16", "fp8", "fp8_block", "nvfp4", "w4a16_mxfp4")),
          ("distribution", "in", ("balanced", "power_law_1.01"))], expert),
    Made("small_reduce", "comm/{}/custom_allreduce_perf",
         [("message_size", ">=", 1024), ("message_size", "<=", 2**22)], reduce),
)  # fmt: skip


def measured(checkout: str, path: str, made: Made) -> dict[tuple[Any, ...], tuple[Row, float]]:
    """The rows of one table by their sizes, with the seconds of the fastest kernel; none where the table is missing."""
    shown = subprocess.run(["git", "-C", checkout, "show", f"HEAD:{path}"], capture_output=True, check=False)
    if shown.returncode:
        return {}
    found: dict[tuple[Any, ...], tuple[Row, float]] = {}
    for row in pq.read_table(io.BytesIO(shown.stdout), filters=made.filters).to_pylist():
        if sizes := made.row(row):
            key, took = tuple(sizes.values()), row["latency"] / 1e3
            found[key] = (sizes, min(took, found.get(key, (sizes, took))[1]))
    return found


def main(checkout: str) -> None:
    """Writes the tables: shapes that TensorRT-LLM has, with the seconds of each library that has them."""
    for made in MADE:
        written: list[Row] = []
        for chip in CHIPS:
            libraries = {}
            for name, (version, on_a100) in SOFTWARE.items():
                at = f"{name}/{on_a100 if chip == 'a100_sxm' else version}"
                libraries[name] = measured(checkout, f"{FOLDER}/{chip}/{made.source.format(at)}.parquet", made)
            for key, (sizes, _) in sorted(libraries["trtllm"].items()):
                took = {
                    f"seconds_{name}": f"{rows[key][1]:.4g}" if key in rows else "" for name, rows in libraries.items()
                }
                written.append({"chip": chip} | sizes | took)
        with (TABLES / f"{made.name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(written[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(written)


if __name__ == "__main__":
    main(sys.argv[1])
