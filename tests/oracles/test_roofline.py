"""Worked answers on rooflines: intensities, critical batches and bounds of one operation."""

from meshwright.algebra.notation import parse_array
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.cost.formulas import roofline
from meshwright.cost.formulas.accounting import attention_work
from meshwright.spec.chip import chip, known, peak
from tests.oracles.worked import Answers, Inputs


def operands(text: str) -> tuple[tuple[roofline.Operand, roofline.Operand], roofline.Operand]:
    """Operands and result of ``bf16[B,D] * int8[D,F] -> bf16[B,F]``."""
    lhs, rhs, out = (roofline.Operand(array.dims, array.dtype) for array in parse_einsum(text))
    return (lhs, rhs), out


def work(text: str, **sizes: float) -> roofline.Work:
    """FLOPs and bytes of an einsum."""
    inputs, out = operands(text)
    return roofline.einsum_work(inputs, out, sizes)


def math_s(flops: float, name: str) -> float:
    """Seconds of that many bf16 FLOPs on a chip."""
    return roofline.chip_roofline(roofline.Work(flops=flops, num_bytes=0), chip(name), dtype="bf16").math_s


def transfer_s(num_bytes: float, name: str) -> float:
    """Seconds to read that many bytes from a chip's memory."""
    return roofline.chip_roofline(roofline.Work(flops=0, num_bytes=num_bytes), chip(name), dtype="bf16").transfer_s


def critical_rows(i: Inputs, *, channel: str) -> float:
    """Batch from which int8[B,D] x int8[D,F] is compute-bound on a v5e, every byte counted."""
    inputs, out = operands("int8[B,D] * int8[D,F] -> int8[B,F]")
    v5e, sizes = chip("v5e-book"), {"D": i["D"], "F": i["F"]}
    rates = {"peak_flops": peak(v5e, "int8"), "bytes_per_s": roofline.channel_rate(v5e, channel)}
    return roofline.critical_size(inputs, out, sizes, dim="B", **rates)


def dot_product(length: int) -> float:
    """Intensity of a bf16 dot product."""
    x = roofline.Operand(parse_array("bf16[N]").dims, "bf16")
    return roofline.einsum_work((x, x), roofline.Operand((), "bf16"), {"N": length}).intensity


ANSWERS: Answers = {
    "book-1.1-dot-N": lambda i: dot_product(i["N"]),
    "book-1.1-h100-1TF": lambda i: math_s(i["flops"], "h100-book"),
    "book-1.1-int8-crit": lambda i: roofline.critical_intensity(
        peak(chip("v5e-book"), "int8"), roofline.channel_rate(chip("v5e-book"), "hbm")
    ),
    "book-1.1-v5e-crit": lambda i: roofline.critical_intensity(
        peak(chip("v5e-book-section1"), "bf16"), roofline.channel_rate(chip("v5e-book-section1"), "hbm")
    ),
    "book-1.1-v6e-1TF": lambda i: math_s(i["flops"], "v6e-book-section1"),
    "book-1.1-vpu-crit": lambda i: roofline.critical_intensity(
        known(chip("v5p-book"), "vector_flops"), roofline.channel_rate(chip("v5p-book"), "hbm")
    ),
    "book-1.1.2-bcrit-bf16": lambda i: roofline.critical_batch(i["peak"], i["bw"], weight_bytes=i["bytes"]),
    "book-1.1.3-2chip-D": lambda i: roofline.critical_split_dim(
        peak(chip("v5e-book"), "bf16"), known(chip("v5e-book"), "ici_link_bytes_per_s"), num_chips=i["chips"]
    ),
    "book-1.1.3-2chip-ratio": lambda i: roofline.critical_intensity(
        peak(chip("v5e-book"), "bf16"), known(chip("v5e-book"), "ici_link_bytes_per_s")
    ),
    "book-ex1.1-bcrit-int8": lambda i: roofline.critical_batch(i["peak"], i["bw"], weight_bytes=i["weight_bytes"]),
    "book-ex1.2-bcrit-w8a16": lambda i: roofline.critical_batch(
        i["peak"], roofline.channel_rate(chip("v5e-book-section1"), "hbm"), weight_bytes=i["weight_bytes"]
    ),
    "book-ex1.4-batched": lambda i: (
        work("int8[B,D] * int8[B,D,F] -> int8[B,F]", B=i["B"], D=i["D"], F=i["F"]).intensity
    ),
    "book-ex1.5-h100-bcrit": lambda i: roofline.critical_batch(i["peak"], i["bw"]),
    "book-ex2.3-pcie-B": lambda i: roofline.critical_batch(
        peak(chip("v6e-book"), "bf16"), roofline.channel_rate(chip("v6e-book"), "pcie")
    ),
    "book-ex2.4-B": lambda i: critical_rows(i, channel="hbm"),
    "book-ex2.4-B-vmem": lambda i: critical_rows(i, channel="vmem"),
    "book-ex2.6-flops": lambda i: math_s(
        work("bf16[B,D] * bf16[D,F] -> bf16[B,F]", B=i["B"], D=i["D"], F=i["F"]).flops, "v5e-book"
    ),
    "book-ex2.6-hbm": lambda i: transfer_s(i["bytes"], "v5e-book"),
    "book-ex4.4-prefill": lambda i: (
        attention_work(queries=i["T"], keys=i["T"], heads=i["G"], kv_heads=1, head_dim=128).intensity
    ),
    "s000-dot": lambda i: dot_product(i["n"]),
    "s000-h100-bcrit-dense": lambda i: roofline.critical_batch(
        peak(chip("h100"), "bf16"), roofline.channel_rate(chip("h100"), "hbm")
    ),
    "s000-matmul": lambda i: work("bf16[M,N] * bf16[N,P] -> bf16[M,P]", M=i["m"], N=i["n"], P=i["p"]).intensity,
    "s000-trillium-bcrit": lambda i: roofline.critical_batch(i["peak"], i["bw"]),
    "s003-fuse": lambda i: roofline.critical_intensity(i["flops"], i["bw"]) * i["bytes"],
}
