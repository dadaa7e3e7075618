"""Seconds of local ops on one chip: data-sheet rates, and what shapes and launches add."""

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.cached_attention import queries_of
from meshwright.algebra.ops.collective_matmul import num_blocks
from meshwright.algebra.ops.dispatch import has_slots, is_at_experts
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.sizes import Number
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.work.host_work import amounts_of, is_product, pace_of
from meshwright.cost.work.kernel_times import NCCL_LINKS, KernelRates, grouped_s, kernel_rates
from meshwright.cost.work.ops import is_attention, op_flops, op_hbm_bytes, op_term
from meshwright.cost.work.slots import SlotSizes, block_bytes, computed_share, slot_sizes, unread_bytes
from meshwright.spec.assumptions import AS_RUN, Assumptions, Traits
from meshwright.spec.calibration import (
    Calibration,
    Efficiency,
    HostRates,
    attention_rate,
    host_rates_in,
    matmul_rate,
    memory_rate,
    peak_known,
)
from meshwright.spec.chip import Chip
from meshwright.spec.efficiency import KERNEL_NUMBERS, fitted_numbers

AxisGroup = frozenset[str]
"""Mesh axes that one collective uses jointly; their order does not change its time."""

TILE = 128 * 256
"""Elements of a product's result that one processor (SM) of a GPU computes at a time."""

UNFUSED_KERNELS = 4
"""Kernels of attention that is not fused: scores, mask and softmax, dropout, weighted sum."""

SOFTMAX_KERNELS, SOFTMAX_MATRICES = 4, 4
"""Further kernels of software of 2021 that does not fuse mask and softmax: cast, scale, mask and cast back. One fused
kernel needs a multiple of four matrices of scores, one for each sequence and head (Megatron-LM's fused_softmax.py)."""

LONGEST_DRAFT = 64
"""Most positions of a sequence in a step that are a draft to check; more are a prompt."""

CASTS_BYTES = 2
"""Bytes written for each element that the op before a product casts to one byte: in its layout and transposed."""


ONE_HOT = {"dispatch": 1, "dispatch_backward": 1, "combine": 1, "combine_backward": 2}
"""Products with one-hot rows in each step; combine's backward pass has two, as routing weights have gradients."""


class ChipRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one chip; fields may be arrays, one entry per candidate.

    ``wide_flops_per_s`` is the rate of the loss head and the router, which keep the dtype of the state if other
    products are ``narrow``. ``processors`` is the number of SMs, 0 for chips without. With ``one_hot`` products with
    one-hot rows move tokens to their slots and back. ``host`` prices emulated devices whose steps have been measured,
    whose products of few rows read weights at ``weight_bytes_per_s``.
    """

    matmul_flops_per_s: Number
    wide_flops_per_s: Number
    attention_flops_per_s: Number
    hbm_bytes_per_s: Number
    processors: Number = 0
    narrow: bool = False
    software: Traits = AS_RUN.traits
    one_hot: bool = False
    efficiency: Efficiency = Efficiency()
    host: HostRates | None = None
    weight_bytes_per_s: Number = np.inf
    kernels: KernelRates | None = None


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one execution of a derived step on one device, and how many times a training step executes it.

    ``flops`` are of the mean device, seconds and bytes of the device with the busiest experts. ``count`` covers all
    layers, ``here`` the layers on the busiest device of a pipeline, which has the head. ``network_bytes`` are of the
    full array of a collective, ``latency_s`` is the part of ``network_s`` that bytes do not explain, and ``level`` is
    the level of the network that binds. ``overlap`` is the exponent of `partly_hidden` for compute and memory.
    ``exposed_s`` are seconds of communication that overlap with nothing.
    """

    step: Step
    count: Number = 1
    here: Number = 1
    flops: Number = 0.0
    hbm_bytes: Number = 0.0
    math_s: Number = 0.0
    hbm_s: Number = 0.0
    launch_s: Number = 0.0
    num_kernels: Number = 0
    overlap: Number | None = None
    network_bytes: Number = 0.0
    network_s: Number = 0.0
    latency_s: Number = 0.0
    exposed_s: Number = 0.0
    level: str | np.ndarray = ""

    @property
    def local_s(self) -> Number:
        """Seconds on the device: compute and memory overlap, the launch does not."""
        return partly_hidden(self.math_s, self.hbm_s, self.overlap) + self.launch_s

    @property
    def time_s(self) -> Number:
        """Seconds of one execution without overlap with other steps."""
        return self.local_s + self.network_s + self.exposed_s

    @property
    def hides(self) -> bool:
        """True for a collective that nothing in its pass waits for."""
        return self.step.is_collective and not self.step.critical and self.step.phase != "update"

    @property
    def in_ring_loop(self) -> bool:
        """True for a permute in the ring of a collective matmul, which only the products of that matmul hide."""
        return isinstance(self.step.details, Round) and self.step.details.beside_products

    @property
    def gathers_weights(self) -> bool:
        """True for a gather that needs no result of its pass, so that it can run ahead of the pass."""
        return self.step.op == "all_gather" and self.hides

    @property
    def term(self) -> str:
        """The kind of local work, or the mesh axes of a collective: ``"matmul"``, ``"fsdp,context"``."""
        return ",".join(self.step.axes) if self.step.is_collective else op_term(self.step)

    @property
    def group(self) -> AxisGroup:
        """The mesh axes of a collective."""
        return frozenset(self.step.axes)


def chip_rates(
    chip: Chip,
    calibration: Calibration,
    *,
    dtype: str,
    state_dtype: str,
    assumptions: Assumptions = AS_RUN,
) -> ChipRates:
    """Returns the rates of a chip for products of ``dtype`` in a training state of ``state_dtype``.

    Attention that is not fused, as in software of 2021, has the rate of products.
    """
    software = assumptions.traits
    attn_flops_per_s = matmul_rate(chip, calibration, dtype)
    if software.fuses_attention:
        attn_flops_per_s = attention_rate(chip, calibration, dtype, narrow=assumptions.attention_kernel == "narrow")
    if assumptions.attention_kernel == "portable":
        attn_flops_per_s *= calibration.efficiency.portable
    efficiency = calibration.efficiency
    if calibration.host:
        # emulated devices do not overlap compute and memory
        efficiency = replace(efficiency, overlap=1.0)
    return ChipRates(
        matmul_flops_per_s=matmul_rate(chip, calibration, dtype),
        wide_flops_per_s=matmul_rate(chip, calibration, state_dtype if peak_known(chip, state_dtype) else dtype),
        attention_flops_per_s=attn_flops_per_s,
        hbm_bytes_per_s=memory_rate(chip, calibration),
        processors=chip.num_sms or 0,
        software=software,
        one_hot=assumptions.dispatch == "one_hot",
        narrow=DTYPE_BYTES[dtype] < DTYPE_BYTES[state_dtype],
        efficiency=efficiency,
        host=host_rates_in(calibration, dtype),
        weight_bytes_per_s=calibration.weight_bytes_per_s.get(dtype, np.inf),
        kernels=serving_kernels(chip) if software.is_engine else None,
    )


def serving_kernels(chip: Chip) -> KernelRates | None:
    """Returns the fitted kernel rates of a GPU with NVLink of a measured family; None for other chips."""
    is_measured = chip.family in NCCL_LINKS
    return kernel_rates(chip, fitted_numbers(KERNEL_NUMBERS).numbers) if is_measured else None


def local_cost(
    step: Step, sizes: SlotSizes, rates: ChipRates, *, kept: frozenset[ShardedArray] = frozenset()
) -> StepCost:
    """Returns the cost of a local step without overlap: its products, its memory traffic and its launches.

    ``kept`` are the results that its block keeps; an emulated device also copies these into a stack.
    """
    fit = rates.efficiency
    if rates.host is not None:
        return _host_cost(step, sizes, rates, kept)
    math_s: Number = 0.0
    if step.parts:
        # each block is a smaller product, and a launch of its own
        num_parts = num_blocks(step, sizes)
        num_bytes, num_launches = op_hbm_bytes(step, sizes), len(step.parts) * num_parts
        block_sizes = replace(sizes, dims={**sizes.dims, step.dim: sizes.dims[step.dim] / num_parts}, cache={})
        for part in step.parts:
            part_s, cast_bytes = _product_s(part, op_flops(part, block_sizes), block_sizes, rates)
            math_s, num_bytes = math_s + num_parts * part_s, num_bytes + num_parts * cast_bytes
    else:
        flops, num_bytes = op_flops(step, sizes) * computed_share(step, sizes), moved_bytes(step, sizes)
        if rates.kernels:
            num_bytes = num_bytes - unread_bytes(step, sizes)
        num_launches = num_kernels(step, sizes)
        if is_attention(step):
            head_width = sizes.dims[queries_of(step).dims[-1]]
            math_s = flops / rates.attention_flops_per_s * (1 + fit.head_half / head_width)
            is_causal = sizes.causal and (step.details is None or not step.details.sees_all)
            if sizes.sequences:
                math_s = math_s * (1 + np.where(sizes.rows_each > LONGEST_DRAFT, fit.rows_half / sizes.rows_each, 0.0))
            elif is_causal:
                math_s = math_s * (1 + fit.rows_half / sizes.dims["T"])
        elif kind_of(step).is_einsum:
            math_s, cast_bytes = _product_s(step, flops, sizes, rates)
            num_bytes = num_bytes + cast_bytes
            if rates.software.starts_kernels and is_at_experts(step):
                num_launches = num_launches * sizes.local(*step.inputs)["E"]
        else:
            math_s = flops / rates.wide_flops_per_s
            if rates.one_hot and (sums_per_slot := ONE_HOT.get(step.op)):
                # each slot is a sum over all positions of its sequence
                slot_array = next(array for array in (*step.results, *step.inputs) if has_slots(array))
                math_s = sums_per_slot * 2 * sizes.elements(slot_array) * sizes.dims["T"] / rates.matmul_flops_per_s
            if not rates.software.is_compiled and step.phase != "update":
                num_bytes = num_bytes * fit.eager_traffic
    return StepCost(
        step=step,
        flops=_mean_flops(step, sizes),
        hbm_bytes=num_bytes,
        math_s=math_s,
        hbm_s=num_bytes / rates.hbm_bytes_per_s,
        launch_s=num_launches * fit.kernel_s,
        num_kernels=num_launches,
        overlap=fit.overlap,
    )


def partly_hidden(first: Number, second: Number, overlap: Number | None) -> Number:
    """Returns the seconds of two activities that overlap in part: (a^p + b^p)^(1/p), or the longer if p is None."""
    if overlap is None:
        return np.maximum(first, second)
    seconds: Number = (first**overlap + second**overlap) ** (1 / overlap)
    return seconds


def _mean_flops(step: Step, sizes: SlotSizes) -> Number:
    """Returns the FLOPs of one execution of a step on the mean device, on which experts have an even load."""
    even_sizes = sizes if np.all(np.asarray(sizes.load) == 1) else replace(sizes, load=1.0, cache={})
    return op_flops(step, even_sizes) * computed_share(step, even_sizes)


def moved_bytes(step: Step, sizes: SlotSizes) -> Number:
    """Returns the bytes that one execution of a local step moves, with the further traffic of slots of experts."""
    return op_hbm_bytes(step, slot_sizes(step, sizes)) + block_bytes(step, sizes)


def num_kernels(step: Step, sizes: SlotSizes) -> Number:
    """Returns the kernels that a step starts: 0 for renaming, and for the optimizer, which takes all weights."""
    if step.phase == "update":
        return 0
    if not is_attention(step) or sizes.scores == "on_chip":
        return kind_of(step).num_kernels
    if sizes.scores == "in_memory":
        return UNFUSED_KERNELS
    queries = queries_of(step)
    num_matrices = product(
        size for dim, size in sizes.local(queries).items() if dim in (queries.dims[0], *queries.dims[2:-1])
    )
    return UNFUSED_KERNELS + SOFTMAX_KERNELS * (np.round(num_matrices) % SOFTMAX_MATRICES > 0)


def _product_s(step: Step, flops: Number, sizes: SlotSizes, rates: ChipRates) -> tuple[Number, Number]:
    """Returns the seconds of a matrix product, and the bytes moved by casting its first operand to a narrower dtype.

    The operands of the loss head and the router are not cast.
    """
    num_outputs, num_terms = product_shape(step, sizes)
    is_wide = step.role == "head" or step.result.dims[-1] == "E" or any(a.dims[-1] == "E" for a in step.inputs)
    fit = rates.efficiency
    flops_per_s = rates.wide_flops_per_s if is_wide else rates.matmul_flops_per_s
    slowdown = (1 + fit.contraction_half / num_terms) * (1 + fit.tile_tail * rates.processors * TILE / num_outputs)
    cast_bytes = CASTS_BYTES * sizes.elements(step.inputs[0]) if rates.narrow and not is_wide else 0.0
    seconds = flops / flops_per_s * slowdown
    if rates.kernels and is_at_experts(step):
        # the engine's grouped products of a prompt, as measured in 16 bits
        num_experts, num_columns = (sizes.local(*step.results)[dim] for dim in ("E", step.result.dims[-1]))
        kernel_shape = {"M": num_outputs / num_columns, "K": num_terms, "N": num_columns, "G": num_experts, "copied": 0}
        measured_s = grouped_s(kernel_shape, rates.kernels) * rates.wide_flops_per_s / rates.matmul_flops_per_s
        seconds = np.where(np.asarray(sizes.rows_each) > LONGEST_DRAFT, measured_s, seconds)
    return seconds, cast_bytes


def product_shape(step: Step, sizes: SlotSizes) -> tuple[Number, Number]:
    """Returns the elements of the local result, and the number of terms that a device sums for each."""
    size_by_dim = sizes.local(*step.inputs[:2])
    result_dims = set(step.result.dims)
    num_outputs = product(size for dim, size in size_by_dim.items() if dim in result_dims)
    return num_outputs, product(size for dim, size in size_by_dim.items() if dim not in result_dims)


def _host_cost(step: Step, sizes: SlotSizes, rates: ChipRates, kept_arrays: frozenset[ShardedArray]) -> StepCost:
    """Prices a local step on an emulated device by its `HostRates`; a product takes at least the seconds of reading its
    factors."""
    host = rates.host
    assert host is not None
    amounts, pace = amounts_of(step, sizes, kept=kept_arrays), pace_of(step, host)
    num_launches = num_kernels(step, sizes) * (num_blocks(step, sizes) * len(step.parts) if step.parts else 1)
    math_s, memory_s = amounts.math_s(pace), amounts.memory_s(pace)
    if is_product(step):
        memory_s = memory_s + np.maximum(0.0, amounts.byte / rates.weight_bytes_per_s - math_s - memory_s)
    return StepCost(
        step=step,
        flops=_mean_flops(step, sizes),
        hbm_bytes=moved_bytes(step, sizes),
        math_s=math_s,
        hbm_s=memory_s + block_bytes(step, sizes) * host.stream.byte,
        launch_s=num_launches * host.kernel_s,
        num_kernels=num_launches,
        overlap=rates.efficiency.overlap,
    )
