"""Worked answers on serving Llama 3 70B: caches, slices, steps, queries, pools of prefill and generation."""

import pytest

from meshwright.calculators.serving.replica import DecodeStep, request_rates, smallest_slice
from meshwright.calculators.serving.sharding import decode_max_tensor, product_link_s
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.formulas.limits import tensor_max_size
from meshwright.cost.formulas.training_budget import flops_per_dollar, min_chips
from meshwright.spec.chip import chip, known
from tests.oracles.shapes import dense, serving
from tests.oracles.worked import Answers, Inputs


def stored(i: Inputs) -> float:
    """Bytes of the row's weights."""
    return serving(i).weight_bytes


def token_bytes(i: Inputs) -> float:
    """Bytes of a token's cache in a model with the row's letters."""
    return kv_cache_bytes(dense(D=8192, K=i["K"], H=i["H"], L=i["L"]), 1, element_bytes=i["bytes"])


def caches(i: Inputs) -> float:
    """Bytes of the row's caches."""
    return serving({"params": 0, "bytes": 2, **i}).kv_bytes(i["S"]) * i.get("batch", 1)


def free(i: Inputs) -> float:
    """Bytes that the row's weights leave on its chips."""
    return serving(i).free_bytes


def batch_that_fits(i: Inputs) -> float:
    """Caches of the row that fit beside its weights."""
    return serving(i).batch_that_fits(caches(i))


def reading_s(i: Inputs) -> float:
    """Seconds to read bytes, or the row's weights, from the memories of all chips."""
    return serving(i if "params" in i else {**i, "params": i["bytes"], "bytes": 1}).step(0, 0).time_s


def requests(i: Inputs) -> dict[str, float]:
    """Figures of the row's requests, in steady state."""
    lengths = {"prompt_len": i.get("P", 0), "output_len": i.get("steps", i.get("G"))}
    times = {"prefill_s": i.get("t_prefill", 0.0), "num_chips": i.get("chips", 1)}
    return request_rates(i["batch"], i.get("t_step", 0.019), **lengths, **times)


def product(i: Inputs) -> DecodeStep:
    """The row's matmul over its chips."""
    params = i["D"] * i["F"]
    figures = {"weight_bytes": 2 * params, "active_params": params, "hbm_bytes_per_s": i.get("bw", 1.0)}
    return DecodeStep(batch_seqs=i["B"], kv_bytes=0, num_chips=i["chips"], peak_flops=i["peak"], **figures)


def dollar(i: Inputs) -> float:
    """FLOPs of a dollar at the row's price."""
    return flops_per_dollar(i["peak"], price_usd_per_hour=i["usd_per_hour"])


ANSWERS: Answers = {
    "book-8.1-17ms": reading_s,
    "book-8.1-86": lambda i: min_chips(i["bytes"], i["cap"]),
    "book-8.1-Y": lambda i: tensor_max_size(i["F"], i["alpha"], i["axes"]),
    "book-8.1-dollar-h100": dollar,
    "book-8.1-dollar-v5p": dollar,
    "book-8.1-kv": token_bytes,
    "book-8.1-kv240": caches,
    "book-8.1-kv32k": caches,
    "book-8.1.1-19ms": reading_s,
    "book-8.1.1-4.42": lambda i: requests(i)["per_s"],
    "book-8.1.1-56": lambda i: decode_max_tensor(i["F"], i["B"], beta=i["beta"]),
    "book-8.1.1-9s": lambda i: requests({"batch": 1, "steps": i["tokens"], **i})["generation_s"],
    "book-8.1.1-Tici": lambda i: product_link_s(i["B"], i["D"], axis_bytes_per_s=i["w"], activation_bytes=i["bytes"]),
    "book-8.1.1-Tmath": lambda i: product(i).flops_s,
    "book-8.1.1-bf16-kvtok": token_bytes,
    "book-8.1.1-bf16-min": lambda i: stored(i) / serving(i).memory_bytes,
    "book-8.1.1-bf16-num": batch_that_fits,
    "book-8.1.1-bf16-params": stored,
    "book-8.1.1-bf16-rem": free,
    "book-8.1.1-dbl-batch": batch_that_fits,
    "book-8.1.1-dbl-qps-int4": lambda i: requests(i)["per_s_per_chip"],
    "book-8.1.1-dbl-qps-int8": lambda i: requests(i)["per_s_per_chip"],
    "book-8.1.1-int4-kvtok": token_bytes,
    "book-8.1.1-int4-lat": reading_s,
    "book-8.1.1-int4-params": stored,
    "book-8.1.1-int4-rem": free,
    "book-8.1.1-int8-kvtok": token_bytes,
    "book-8.1.1-int8-num": batch_that_fits,
    "book-8.1.1-int8-params": stored,
    "book-8.1.1-int8-rem": free,
    "book-8.1.1-qps-int8": lambda i: requests(i)["per_s_per_chip"],
    "book-8.1.1-slice": lambda i: [
        smallest_slice(chip("v5e-book"), stored({**i, "bytes": width})).num_chips for width in i["bytes"]
    ],
    "book-8.1.2-evict": lambda i: requests(i)["evicted_per_step"],
    "book-8.1.2-ratio": lambda i: requests(i)["prefill_servers"],
    "book-8.2-low": reading_s,
}


def test_the_chip_of_the_slices_has_the_memory_of_the_row():
    assert known(chip("v5e-book"), "memory_bytes") == 16e9


def test_prefill_of_section_8_1_2():
    llama = serving({"params": 70e9, "bytes": 2, "chips": 16, "peak": 1.97e14})
    assert llama.prefill_s(8192, mfu=0.4) == pytest.approx(0.91, rel=2e-3)


def test_matmul_of_section_8_1_1():
    own = product({"B": 64, "D": 8192, "F": 28672, "chips": 32, "peak": 1.97e14, "bw": 8.1e11})
    assert own.weights_s == pytest.approx(18e-6, rel=0.01)
    assert product_link_s(64, 8192, axis_bytes_per_s=9e10) < own.weights_s
