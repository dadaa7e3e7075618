"""Worked answers on inference: critical batches, steps of generation, what fits, limits of sharding."""

from meshwright.calculators.serving.replica import DecodeStep, uncached_share
from meshwright.calculators.serving.sharding import WeightStationary, decode_max_tensor, hbm_over_link
from meshwright.cost.formulas.accounting import attention_work
from meshwright.cost.formulas.roofline import critical_batch
from tests.oracles.shapes import serving
from tests.oracles.worked import Answers, Inputs


def load_s(i: Inputs) -> float:
    """Seconds to read the row's weights from the memories of all chips."""
    return serving(i).step(0, 0).weights_s


def in_bytes(i: Inputs) -> Inputs:
    """The row with its bytes of parameters as parameters of a byte."""
    return {**i, "params": i["params_bytes"], "bytes": 1}


def shortest(i: Inputs) -> DecodeStep:
    """A step of the row's batch without its FLOPs."""
    return serving(in_bytes(i)).step(i["batch"], i["kv"])


def attention_intensity(i: Inputs, queries: int) -> float:
    """FLOPs per byte of attention with a kv head for every head."""
    return attention_work(queries=queries, keys=i["S"], heads=8, kv_heads=8, head_dim=128).intensity


def critical(i: Inputs, **experts: int) -> float:
    """Critical batch on a chip with the row's critical intensity."""
    return critical_batch(i["crit"], 1, weight_bytes=i["weight_bytes"], **experts)


def split(i: Inputs, chips: int) -> WeightStationary:
    """A layer of the row's F over D, with D = 1."""
    return WeightStationary(d_model=1, d_ff=i["F_over_D"], num_chips=chips)


CACHES, BATCHES = ("6.7", "1.34"), (1, 8, 16, 32, 64, 240)
TABLE = [f"{cache}-{batch}" for cache in CACHES for batch in BATCHES]
"""The columns of section 7.1.7's tables."""

ANSWERS: Answers = {
    **{f"book-7.1.7-t-{at}": lambda i: shortest(i).time_s for at in TABLE if at != "1.34-64"},
    **{
        f"book-7.1.7-tp-{at}": lambda i: shortest(i).tokens_per_s
        for at in TABLE
        if at not in ("6.7-64", "6.7-240", "1.34-16")
    },
    "book-7.1.3-bcrit": lambda i: critical_batch(i["peak"], i["bw"], weight_bytes=i["weight_bytes"]),
    "book-7.1.4-gen": lambda i: attention_intensity(i, 1),
    "book-7.1.4-prefill": lambda i: attention_intensity(i, i["T"]),
    "book-7.1.5-b256": lambda i: serving({**i, "bytes": 1}).step(i["batch"], i["kv"]).time_s,
    "book-7.1.7-oom": lambda i: serving(in_bytes(i)).batch_that_fits(i["kv"]),
    "book-7.3.2-Y": lambda i: decode_max_tensor(i["F"], i["B"], beta=i["beta"]),
    "book-7.3.2-beta": lambda i: hbm_over_link(i["hbm"], i["ici"]),
    "book-7.4.2-prefix": lambda i: uncached_share(i["cached"], i["total"]),
    "book-7.6.1-lat": load_s,
    "book-ex2.1-load": load_s,
    "book-ex4.8-deepseek": lambda i: critical(i, num_experts=i["E"], active_experts=i["k"]),
    "book-ex4.8-ratio": critical,
    "book-ex7.7-X": lambda i: split(i, i["N"]).best_size,
    "book-ex7.7-const": lambda i: split(i, 1).comms_s(1, over_d=split(i, 1).best_size, axis_bytes_per_s=1),
}
