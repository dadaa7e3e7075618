"""Writes the tables of the kernels of token generation in data/kernels from a checkout of ai-dynamo/aiconfigurator.

python benchmarks/generation_kernels.py CHECKOUT   # a git directory; needs pandas and pyarrow
"""

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

TABLES = Path(__file__).parent / "data" / "kernels"
FOLDER = "aic-core/src/aiconfigurator_core/systems/data"
CHIPS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "b300_sxm", "gb300")
SOFTWARE = {"trtllm": ("1.3.0rc20", "1.0.0"), "vllm": ("0.24.0", "0.14.0"), "sglang": ("0.5.14", "0.5.10")}
"""Version on all chips but a100, and on a100."""

DTYPES = {"bfloat16": "bf16", "w4a16_mxfp4": "mxfp4"}
FEW = (1, 8, 32, 128, 512)
LENGTHS = (256, 1024, 4096, 16384, 65536)
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


def products(table: pd.DataFrame) -> pd.DataFrame:
    chosen = np.array([pair in MATRICES for pair in zip(table.n, table.k, strict=True)])
    few = table.m.isin((1, 4, 16, 64, 128, 256, 512)) & table.gemm_dtype.isin(("bfloat16", "fp8", "fp8_block", "nvfp4"))
    return table[few & chosen].assign(dtype=lambda at: at.gemm_dtype.replace(DTYPES))


def attention(table: pd.DataFrame) -> pd.DataFrame:
    table = _cached(table.assign(window_size=table.get("window_size", 0)))
    kv_heads = table.num_key_value_heads.where(table.num_key_value_heads > 0, table.num_heads)
    shapes = zip(table.num_heads, kv_heads, table.head_dim, table.window_size, strict=True)
    return table[[shape in HEADS for shape in shapes]]


def latent(table: pd.DataFrame) -> pd.DataFrame:
    return _cached(table[table.num_heads.isin((16, 64, 128))])


def _cached(table: pd.DataFrame) -> pd.DataFrame:
    table = table.assign(length=table.step + 1, bits=table.kv_cache_dtype.map({"bfloat16": 16, "fp8": 8}))
    return table[table.batch_size.isin(FEW) & table.length.isin(LENGTHS)]


def experts(table: pd.DataFrame) -> pd.DataFrame:
    """One of the two ways to split; a token alone may meet any of the experts of a device, so that it counts for whole
    sets of experts only."""
    shapes = zip(table.hidden_size, table.inter_size, table.topk, table.num_experts, strict=True)
    split = list(zip(table.moe_tp_size, table.moe_ep_size, strict=True))
    keep = table.num_tokens.isin(FEW) & table.moe_dtype.isin(("bfloat16", "fp8", "fp8_block", "nvfp4", "w4a16_mxfp4"))
    keep &= np.array([pair in ((1, 1), (8, 1), (1, 8), (4, 1), (1, 4)) for pair in split])
    keep &= (table.distribution == "power_law_1.01") | ((table.distribution == "balanced") & np.array([8 in pair for pair in split]))
    keep &= (table.num_tokens > 1) | (table.moe_ep_size == 1)
    table = table[keep & np.array([shape in EXPERTS for shape in shapes])]
    keys = zip(table.num_tokens, table.topk, table.num_experts, table.moe_ep_size, table.distribution, strict=True)
    found = [loads(*key) for key in keys]
    return table.assign(
        dtype=table.moe_dtype.replace(DTYPES),
        inner=table.inter_size // table.moe_tp_size,
        rows=[rows for rows, _ in found],
        met=[met for _, met in found],
    )


DRAWN: dict[tuple[object, ...], tuple[str, str]] = {}


def loads(tokens: int, chosen: int, num_experts: int, ranks: int, routing: str) -> tuple[str, str]:
    """Returns the rows of a device and its experts that any token chooses, the mean of draws by the tables' collector
    (collector/helper.py): loads follow a power law, are rounded and corrected, and the busiest device counts."""
    key = (tokens, chosen, num_experts, ranks, routing)
    if key not in DRAWN:
        even = (tokens * chosen / ranks, min(num_experts, tokens * chosen) / ranks)
        drawn = [even] if routing == "balanced" else [draw(tokens, chosen, num_experts, ranks) for _ in range(DRAWS)]
        rows, met = np.mean(drawn, axis=0)
        DRAWN[key] = (f"{rows:.4g}", f"{met:.4g}")
    return DRAWN[key]


RANDOM = np.random.default_rng(0)


def draw(tokens: int, chosen: int, num_experts: int, ranks: int) -> tuple[float, float]:
    low, high = (1, tokens * 0.8) if tokens * chosen > num_experts else (0.01, 2)
    least, most = low**-0.01, high**-0.01
    drawn = ((most - least) * RANDOM.random(num_experts) + least) ** -100
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


def reduces(table: pd.DataFrame) -> pd.DataFrame:
    table = table[table.message_size.between(1024, 2**22)]
    return table[table.backend.str.endswith("graph")] if "backend" in table else table


TABLES_MADE: tuple[tuple[str, str, Callable[[pd.DataFrame], pd.DataFrame], dict[str, str]], ...] = (
    ("generation_products", "gemm/{}/gemm_perf", products, {"dtype": "dtype", "m": "m", "n": "n", "k": "k"}),
    ("generation_attention", "attention/{}/generation_attention_perf", attention,
     {"bits": "bits", "batch_size": "batch", "length": "length", "num_heads": "heads",
      "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "window_size": "window"}),
    ("generation_latent_attention", "mla/{}/generation_mla_perf", latent,
     {"bits": "bits", "batch_size": "batch", "length": "length", "num_heads": "heads"}),
    ("generation_experts", "moe/{}/moe_perf", experts,
     {"dtype": "dtype", "num_tokens": "tokens", "hidden_size": "hidden", "inner": "inner", "topk": "chosen",
      "num_experts": "experts", "moe_ep_size": "ranks", "distribution": "routing", "rows": "rows", "met": "met"}),
    ("small_reduce", "comm/{}/custom_allreduce_perf", reduces, {"num_gpus": "gpus", "message_size": "bytes"}),
)  # fmt: skip


def read(checkout: Path, name: str) -> pd.DataFrame | None:
    """One table of a checkout, or None where it is missing."""
    shown = ["git", "-C", str(checkout), "show", f"HEAD:{FOLDER}/{name}.parquet"]
    found = subprocess.run(shown, capture_output=True, check=False)
    return None if found.returncode else pd.read_parquet(io.BytesIO(found.stdout))


def seconds(checkout: Path, chip: str, made: Sequence[object]) -> pd.DataFrame | None:
    """The chosen rows of a chip: sizes, and seconds by software."""
    _, form, choose, columns = made
    by_software = {}
    for software, (version, on_a100) in SOFTWARE.items():
        at = f"{software}/{on_a100 if chip == 'a100_sxm' else version}"
        table = read(checkout, f"{chip}/{str(form).format(at)}")
        if table is not None and len(table := choose(table)):  # type: ignore[operator]
            by_software[f"seconds_{software}"] = table.groupby(list(columns))["latency"].min() / 1e3  # type: ignore[call-overload]
    if not by_software:
        return None
    found = pd.DataFrame(by_software).reindex(columns=[f"seconds_{software}" for software in SOFTWARE])
    found = found[found.seconds_trtllm.notna()]
    found = found.map(lambda one: "" if np.isnan(one) else f"{one:.4g}").reset_index()
    found.insert(0, "chip", chip)
    return found.rename(columns=columns)  # type: ignore[call-overload, no-any-return]


if __name__ == "__main__":
    for made in TABLES_MADE:
        parts = [part for chip in CHIPS if (part := seconds(Path(sys.argv[1]), chip, made)) is not None]
        pd.concat(parts).to_csv(TABLES / f"{made[0]}.csv", index=False)
