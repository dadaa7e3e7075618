"""Worked answers on training: when each way of sharding is compute-bound, what it moves, and what a run takes."""

from typing import Any

from meshwright.algebra.blocks import local_shape
from meshwright.algebra.notation import parse_array
from meshwright.algebra.sizes import OpSizes
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.anatomy import pod_totals
from meshwright.cost.formulas.roofline import channel_rate
from meshwright.cost.formulas.training_budget import (
    available_flops,
    global_batch,
    mfu_from_hours,
    num_microbatches,
    petaflop_days,
    train_seconds,
    training_flops,
    years,
)
from meshwright.cost.network.collectives import collective_time
from meshwright.cost.work.ops import op_flops
from meshwright.spec.chip import chip, known, peak
from meshwright.spec.cluster import make_cluster
from meshwright.spec.cluster_shapes import balanced_shape
from meshwright.spec.job import parse_batch
from meshwright.spec.strategy import Strategy, make_mesh
from tests.oracles.shapes import counting, rates, two_matmuls
from tests.oracles.worked import Answers, Inputs

V5P = chip("v5p-book")

ASSIGNMENTS = {
    "DP": {"activation": {"B": ("X",)}},
    "FSDP": {"activation": {"B": ("X",)}, "weight": {"D": ("X",)}},
    "FSDP+TP": {
        "activation": {"B": ("X",), "F": ("Y",), "D": ("Y",)},
        "weight": {"F": ("Y",), "D": ("X",)},
    },
}
"""The book's ways of splitting its two-matmul layer: section 5.1."""

SIZES = {"B": 4096, "D": 8192, "F": 32768}
TORUS = (8, 4, 4)
MESH = dict(zip("XYZ", TORUS, strict=True))

BYTE_PER_SECOND = make_cluster(counting("v5p", link_bytes_per_s=0.5), TORUS)
"""Rings whose two directions together carry one byte per second."""


def alpha(dtype: str = "bf16") -> float:
    """C / W of a v5p, both from the catalogue."""
    return limits.ici_intensity(peak(V5P, dtype), channel_rate(V5P, "ici"))


def moved_bytes(strategy: str, *, arrays: str, phases: tuple[str, ...]) -> float:
    """Bytes that the collectives of the two-matmul layer move through a ring, those of an AllReduce twice."""
    layer, sizes = two_matmuls(MESH, ASSIGNMENTS[strategy]), OpSizes(dims=SIZES, mesh=MESH, state="bf16-adam")
    weights = {"win", "wout", "dwin", "dwout"}
    return sum(
        collective_time(step.op, sizes.bytes(step.full), rates(BYTE_PER_SECOND, MESH, step.axes))
        for step in (*layer.forward, *layer.backward)
        if step.is_collective and step.phase in phases and (step.result.name in weights) == (arrays == "weights")
    )


def weight_bytes() -> float:
    """Bytes of both matrices of the layer, whole, in bf16."""
    return 2 * 2 * SIZES["D"] * SIZES["F"]


def backward_math_s(i: Inputs) -> float:
    """Compute seconds of the layer's backward pass on one of X v5p."""
    mesh = {"X": i["X"]}
    sizes = OpSizes(dims={dim: i[dim] for dim in "BDF"}, mesh=mesh, state="bf16-adam")
    layer = two_matmuls(mesh, ASSIGNMENTS["DP"])
    flops = sum(op_flops(step, sizes) for step in layer.backward if not step.is_collective)
    return train_seconds(flops, peak_flops=peak(V5P, "bf16"))


def of_hosts(num_hosts: int) -> dict[str, Any]:
    """Sums over that many hosts of v5p."""
    return pod_totals(make_cluster(V5P, balanced_shape(int(num_hosts * known(V5P, "chips_per_host")), 3)))


def batch_seqs(i: Inputs) -> int:
    """Sequences of the row's batch of tokens, as `--batch` reads it."""
    return parse_batch(f"{i.get('tokens', i.get('batch')):.0f}", seq_len=i["seq"])


def mixed(i: Inputs) -> float:
    """Tokens per chip from which mixed FSDP and tensor parallelism can be compute-bound, on two and one axes."""
    return limits.mixed_min_tokens_per_chip(i["alpha"], i["F"], fsdp_axes=2, tensor_axes=1)


def mixed_batch(i: Inputs) -> float:
    """The same for all chips."""
    return mixed(i) * i["chips"]


def picked_split(i: Inputs) -> list[int]:
    """The best FSDP size, rounded to a mesh."""
    best = limits.Mixture(i["B"], i["F"], i["N"], alpha(), i["M_X"], i["M_Y"]).best_size
    return list(limits.round_split(best, i["N"]))


def step_seconds(i: Inputs) -> float:
    """Compute seconds of a step of 6 N D FLOPs on the row's devices."""
    return train_seconds(training_flops(i["params"], i["tokens"]), num_chips=i["gpus"], peak_flops=i["peak"])


def flat_comms(i: Inputs) -> float:
    """FSDP's seconds when every collective moves all weights at one rate."""
    return limits.flat_fsdp_comms_s(i["params"], i["bw"], bytes_per_param=i["bytes"], num_collectives=i["collectives"])


def one_device_years(i: Inputs) -> float:
    """Years of the row's FLOPs on one device."""
    return years(train_seconds(i["flops"], peak_flops=i["peak"]))


ANSWERS: Answers = {
    "book-5.1.1-3axes": lambda i: limits.data_parallel_min_tokens_per_chip(alpha(), i["axes"]),
    "book-5.1.1-Tmath": backward_math_s,
    "book-5.1.1-alpha": lambda i: limits.data_parallel_min_tokens_per_chip(alpha(), i["axes"]),
    "book-5.1.1-podbatch": lambda i: limits.data_parallel_min_batch(i["alpha"], i["axes"], i["chips"]),
    "book-5.1.2-deepseek": lambda i: limits.fsdp_max_chips(i["batch"], i["alpha"], i["axes"]),
    "book-5.1.3-int8": lambda i: alpha("int8"),
    "book-5.1.3-tp-gemma": lambda i: limits.tensor_max_size(i["F"], i["alpha"], i["axes"]),
    "book-5.1.3-tp-llama-Y": lambda i: limits.tensor_max_size(i["F"], i["alpha"], i["axes"]),
    "book-5.1.4-fig16": mixed_batch,
    "book-5.1.4-fig16-ok": mixed_batch,
    "book-5.1.4-ratio": lambda i: (
        limits.Mixture(i["B"], i["F"], i["N"], i["alpha"], i["M_X"], i["M_Y"]).math_over_comms
    ),
    "book-5.1.4-xopt-pick": picked_split,
    "book-5.1.6-dcn-chip": lambda i: limits.dcn_min_batch_per_pod(
        peak(V5P, "bf16"), known(V5P, "dcn_bytes_per_s_per_host"), known(V5P, "chips_per_host")
    ),
    "book-5.1.6-dcn-hosts": lambda i: of_hosts(i["hosts"])["dcn_bytes_per_s"],
    "book-5.1.6-drop": mixed_batch,
    "book-5.1.6-fsdp": lambda i: limits.fsdp_max_chips(i["batch"], i["alpha"], i["axes"]),
    "book-5.1.6-mixed": mixed,
    "book-5.2-comm-dp": lambda i: (
        moved_bytes("DP", arrays="weights", phases=("forward", "backward")) / (SIZES["D"] * SIZES["F"])
    ),
    "book-5.2-comm-mixed": lambda i: (
        moved_bytes(i["strategy"], arrays="activations", phases=("backward",)) / (SIZES["B"] * SIZES["D"] / MESH["X"])
    ),
    "book-ex4.7-avail": lambda i: available_flops(i["hours"], peak(chip("h800-book"), "fp8")),
    "book-ex4.7-flops": lambda i: training_flops(i["params"], i["tokens"]),
    "book-ex4.7-mfu": lambda i: mfu_from_hours(
        training_flops(i["params"], i["tokens"]), i["hours"], peak(chip("h800-book"), "fp8")
    ),
    "book-ex5.3-fsdp": lambda i: limits.data_parallel_min_batch(i["alpha"], i["axes"], i["chips"]),
    "book-ex5.3-mixed": mixed,
    "book-ex5.3-seqs": batch_seqs,
    "s000-deepseek": lambda i: limits.fsdp_max_chips(i["batch"], i["alpha"], i["axes"]),
    "s000-fsdp-alpha": lambda i: alpha(),
    "s000-gpt3-pfd": lambda i: petaflop_days(i["pflop"] * 1e15),
    "s000-llama-pfd": lambda i: petaflop_days(i["pflop"] * 1e15),
    "s000-years-gpt3-intel": one_device_years,
    "s000-years-gpt3-m3": one_device_years,
    "s000-years-gpt3-trillium": lambda i: years(train_seconds(i["flops"], peak_flops=peak(chip("v6e"), "bf16"))),
    "s000-years-llama-h100": one_device_years,
    "s000-years-llama-intel": one_device_years,
    "s000-years-llama-trillium": lambda i: years(train_seconds(i["flops"], peak_flops=peak(chip("v6e"), "bf16"))),
    "s001-gbs": lambda i: global_batch(i["mbs"], data_parallel=i["dp"], num_microbatches=i["grad_acc"]),
    "s001-quiz512": lambda i: num_microbatches(i["gbs"], data_parallel=i["dp"], microbatch_seqs=i["mbs"]),
    "s001-seqs": batch_seqs,
    "s001-seqs-pow2": batch_seqs,
    "s003-fsdp-comms": flat_comms,
    "s003-fsdp-comms-2": flat_comms,
    "s003-fsdp-compute": step_seconds,
    "s003-fsdp-compute-2": step_seconds,
    "s003-fsdp-max": lambda i: limits.flat_fsdp_max_chips(i["tokens"], i["peak"], i["bw"]),
    "s003-lbs": lambda i: limits.sequence_limit_chips(i["tokens"], i["seq"]),
    "s004-4d": lambda i: Strategy(mesh=i).num_chips,
    "s004-cp": lambda i: local_shape(parse_array("x[T_X]"), {"T": i["seq"]}, {"X": i["cp"]})[0],
    "s004-fsdp-3x": lambda i: moved_bytes("FSDP", arrays="weights", phases=("forward", "backward")) / weight_bytes(),
    "s004-hsdp": lambda i: Strategy(mesh=make_mesh({"data": i["groups"], "fsdp": i["fsdp"]})).num_chips,
}
