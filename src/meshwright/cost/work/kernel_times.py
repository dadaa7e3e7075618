"""Seconds of one kernel by itself on one device, from its shape: products, attention, losses, collectives over NVLink,
and kernels of token generation on GPUs.

Sizes may be NumPy arrays. Compute and the traffic that overlaps with it take the root of the sum of their squares;
copies before and after, and the kernel's start, add up. Plans price the steps of a whole model by `kernels.local_cost`,
which overlap and compete.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.spec.chip import Chip, known, peak

NVIDIA_TILE = (128, 128)
"""Rows and columns of the tile that one SM computes at a time: of cuBLAS's tiles the one that fills SMs best."""

KernelShape = Mapping[str, Any]
"""Sizes of a kernel by letter, numbers or arrays; a collective's shape also has its kind as ``op``."""

SPLITS = (1, 2, 4, 8)
"""Parts that a library may split K into, to fill the SMs."""

PAIRED_ROWS = 256
"""Rows of a tile that two SMs of Blackwell make together, as Mosaic's grouped products there do."""

GROUP_COLUMNS, GATE_COLUMNS = 64, 256
"""Columns of results in a tile of Mosaic's grouped products, and of its gated units (two of 128), on Hopper: tokamax's
settings."""

NVIDIA_ROWS = 128
"""Rows of queries that an attention kernel on GPUs takes at a time; at the diagonal it reads twice as many keys."""

TPU_KEYS = 2048
"""Keys that causal attention on TPUs reads at a time at the diagonal: the longest blocks of tokamax's settings."""

MASKED = 0.175
"""Share of time that masking adds to a block at the diagonal: 15 to 20% (pytorch.org/blog/flexattention)."""

BLACKWELL_SMS = 148
"""SMs of a B200 in XLA's target for it (``xla_gpu.core_count``; a GB200 has 152). The catalogue has no ``num_sms`` for
it, as plans are fitted without."""

BLACKWELL = (1000.0, 2250e12)
"""A B200's watts and dense bf16 peak in FLOP/s: power, not the peak, limits the rate of Blackwell boards."""

ULTRA = ("b300", "gb300")
"""Blackwell Ultra: twice the exponentials a second (developer.nvidia.com, Making Softmax More Efficient)."""

LONGEST_FIRST = ("h100",)
"""Families whose causal attention begins with the longest blocks: FlashAttention-3, hopper/tile_scheduler.hpp."""

MEMORY = {"gpu": 0.92, "tpu": 0.87}
"""Share of the data sheet's bandwidth that streaming kernels get: Vidur's sums on A100 (0.88) and H100 (0.97), copies
of 1 GB on an Ironwood (tpu-recipes)."""

NCCL_LINKS = {"a100": 12 * 20.0e9, "h100": 18 * 20.6e9, "blackwell": 18 * 40.1e9}
"""Bytes/s one way that NCCL assumes for NVLink: links x SM80, SM90 and SM100_NVLINK_BW of src/graph/topo.h."""

NVLS = {"h100": 0.85, "blackwell": 0.74}
"""Share of `NCCL_LINKS` that sums in the switch get: nvlsEfficiency of NCCL's src/graph/tuning.cc."""

PASSES = {"forward": 1.0, "backward": 2.5}
"""FLOPs of a pass of attention over the forward pass's; the backward pass computes scores again."""


LATENT, LATENT_TILE = (512, 64), 64
"""Entries of a position in a latent cache, unrotated and rotated; heads, and positions, in a tile of FlashMLA."""

SHORT = 256
"""Most positions of a cache that are read in one part: measured times jump above it."""

MATRIX_ROWS = {"blackwell": 128}
"""Rows of a matrix instruction, the fewest that an expert computes: of tcgen05 on one SM; elsewhere 64 (wgmma)."""

QUANTIZERS = {"h100": 4}
"""Further kernel starts of a layer of experts with block scales: fitted to vLLM, whose experts run CUTLASS or Triton on
Hopper, and one fused kernel on Blackwell."""


class KernelRates(msgspec.Struct, frozen=True, kw_only=True):
    """A device's rates, and fitted numbers that say how far its kernels stay behind its data sheet.

    ``flops_per_s`` and ``narrow_flops_per_s`` (fp8) are peaks, ``hbm_bytes_per_s`` is the rate that streams get,
    ``link_bytes_per_s`` the one-way rate that NCCL assumes for NVLink. ``width`` is the side of the matrix unit (0: a
    GPU), ``processors`` the SMs (0: a TPU), ``cores`` the cores that share the device, ``exponentials`` their rate over
    the family's, ``half`` the K at which filling the pipeline of a tile takes as long as its product at the peak (0:
    hidden). ``numbers`` are the fitted ones by name.
    """

    flops_per_s: float
    narrow_flops_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    family: str
    width: int
    processors: int
    cores: int
    exponentials: float
    half: float
    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.numbers:
            raise InputError(f"kernel numbers lack {name!r}. Fit them again: meshwright accuracy --kernels -o FILE.")
        return self.numbers[name]

    def product_s(self, flops: Number, contracted: Number = np.inf, kernel: str = "compute") -> Number:
        """Returns the seconds of products that sum ``contracted`` terms, at the fitted share of the peak."""
        seconds: Number = flops / self.flops_per_s * (1 / self[kernel] + self.half / contracted)
        return seconds

    def mosaic_s(self, flops: Number, contracted: Number, columns: int) -> Number:
        """Returns the seconds of products by Mosaic, in tiles with ``columns`` columns of results.

        On Hopper its instructions of 64 x 64 x 16 take 32 cycles and read 4 KB, the full rate of shared memory (128
        bytes a cycle), so that they stall while the next operands are written there.
        """
        if self.family != "h100":
            return self.product_s(flops, contracted, "pallas")
        read_cycles, write_cycles = NVIDIA_TILE[0] * columns / 32, NVIDIA_TILE[0] + columns
        seconds: Number = flops / self.flops_per_s * (1 + write_cycles / read_cycles + self.half / contracted)
        return seconds

    def memory_s(self, moved: Number) -> Number:
        """Returns the seconds of streaming ``moved`` bytes through main memory."""
        seconds: Number = moved / self.hbm_bytes_per_s
        return seconds

    def waves(self, rows: Number, columns: Number, splits: tuple[int, ...] = (1,)) -> Number:
        """Returns the waves of tiles over SMs as a multiple of full waves, for the best split of K; 1 on TPUs."""
        if not self.processors:
            return 1.0
        tiles_per_sm = np.ceil(rows / NVIDIA_TILE[0]) * np.ceil(columns / NVIDIA_TILE[1]) / self.processors
        ratio: Number = np.min([np.ceil(tiles_per_sm * parts) / (tiles_per_sm * parts) for parts in splits], axis=0)
        return ratio


def kernel_rates(chip: Chip, numbers: Mapping[str, float], *, cores: int | None = None) -> KernelRates:
    """Returns the rates of a chip, or of ``cores`` of its cores.

    A number's value is the most specific one given: for the chip by name, else its family, the side of its matrix unit,
    its kind of chip, or all. Blackwell has no ``half``, since its accumulators are not in registers; its rate grows
    with watts ** ``power``, whatever its peak.
    """
    chip_kind = "tpu" if chip.topology == "torus" else "gpu"
    is_blackwell = chip.family == "blackwell"
    core_share = 1.0 if cores is None else cores / (chip.num_cores or cores)
    peak_share = core_share
    number_of = {key: value for key, value in numbers.items() if "." not in key}
    for suffix in (chip_kind, f"{chip.mxu_dim}", chip.family, chip.name):
        number_of |= {key.removesuffix(f".{suffix}"): num for key, num in numbers.items() if key.endswith(f".{suffix}")}
    if "compute" in number_of:
        number_of.setdefault("pallas", number_of["compute"])
    if is_blackwell and "power" in number_of:
        b200_w, b200_flops_per_s = BLACKWELL
        peak_share *= ((chip.power_w or b200_w) / b200_w) ** number_of["power"] * b200_flops_per_s / peak(chip, "bf16")
    return KernelRates(
        flops_per_s=peak_share * peak(chip, "bf16"),
        narrow_flops_per_s=peak_share * chip.peak_flops.get("fp8", 0.0),
        hbm_bytes_per_s=core_share * known(chip, "hbm_bytes_per_s") * MEMORY[chip_kind],
        link_bytes_per_s=NCCL_LINKS.get(chip.family, chip.nvlink_bytes_per_s or 0.0),
        family=chip.family,
        width=chip.mxu_dim or 0,
        processors=0 if chip_kind == "tpu" else chip.num_sms or (BLACKWELL_SMS if is_blackwell else 0),
        cores=cores or chip.num_cores or 1,
        exponentials=2.0 if chip.name in ULTRA else 1.0,
        half=0.0 if is_blackwell or chip_kind == "tpu" else number_of.get("half", 0.0),
        numbers={"quick": 1.0, "paged": 1.0, "latent": 1.0, "streams": 1.0} | number_of,
    )


def padded(size: Number, unit: Number) -> Number:
    """Returns the size rounded up to a multiple of the unit; unchanged if the unit is 0."""
    return np.ceil(size / unit) * unit if unit else size


def product_s(shape: KernelShape, at: KernelRates, *, narrow: bool = False, blocks: bool = False) -> Number:
    """Returns the seconds of [M, K] x [K, N] in bf16, or in fp8 (``narrow``) with the cast of its rows before it.

    The cast reads entries to find the largest (2 bytes each), then reads and writes all (2 + 1). With scales of
    ``blocks`` of entries one kernel does both, and reads once. On GPUs a tile also takes ``step_s`` per entry of K,
    however few rows it has.
    """
    num_rows, num_terms, num_columns = shape["M"], padded(shape["K"], at.width), padded(shape["N"], at.width)
    moved_bytes = (1 if narrow else 2) * (num_rows * num_terms + num_terms * num_columns) + 2 * num_rows * num_columns
    math_s = at.product_s(2 * num_rows * num_terms * num_columns, num_terms) * at.waves(num_rows, num_columns, SPLITS)
    speedup = at.narrow_flops_per_s / at.flops_per_s * at["narrow"] if narrow else 1
    cast_bytes = (3 if blocks else 5) * num_rows * num_terms if narrow else 0
    start_s = at.memory_s(cast_bytes) + (2 * at["start_s"] if blocks else at["call_s" if narrow else "start_s"])
    start_s = start_s if at.width else start_s + at["step_s"] * num_terms
    total_s: Number = np.hypot(math_s / speedup, at.memory_s(moved_bytes) / at["streams"]) + start_s
    return total_s


def attention_s(shape: KernelShape, at: KernelRates, *, phase: str = "forward", paged: bool = False) -> Number:
    """Returns the seconds of fused attention: B sequences of T positions, N heads and G kv heads of width H.

    A causal query sees (T + block) / 2 keys, a block of them masked. On TPUs heads are padded to the side of the matrix
    unit and take ``grid_s`` to start, and XLA also reads and writes all operands to transpose them. On GPUs the softmax
    adds ``head_half`` to the width of heads; a kernel takes at least as long as its longest block of queries, which is
    added if it runs last; the backward pass first reads outputs with their gradients, and last casts the gradients of
    queries to bf16. ``paged`` operands are gathered by threads, not copied in tiles by Hopper's hardware.
    """
    seq_len, width, n_heads = shape["T"], shape["H"], shape["B"] * shape["N"]
    block_len = TPU_KEYS if at.width else 2 * NVIDIA_ROWS
    num_keys = np.where(shape["causal"] > 0, seq_len / 2 + np.minimum(seq_len, block_len) * (0.5 + MASKED), seq_len)
    key_flops, is_backward = 4 * PASSES[phase] * n_heads * seq_len, phase == "backward"
    operands_s = at.memory_s(4 * (2 if is_backward else 1) * shape["B"] * seq_len * width * (shape["N"] + shape["G"]))
    start_s = at["call_s" if paged else "start_s"]
    if at.width:
        math_s = at.product_s(key_flops * num_keys * padded(width, at.width), kernel="pallas")
        tpu_s: Number = np.hypot(math_s, operands_s) + 2 * operands_s + n_heads * PASSES[phase] * at["grid_s"] + start_s
        return tpu_s
    longest_keys = seq_len * at.processors / (n_heads * np.ceil(seq_len / NVIDIA_ROWS))
    is_last = (shape["causal"] > 0) & (at.family not in LONGEST_FIRST)
    num_keys = np.where(is_last, num_keys + longest_keys, np.maximum(num_keys, longest_keys))
    softmax_width = at["head_half_backward"] if is_backward else at["head_half"] / at.exponentials
    math_s = at.product_s(key_flops * num_keys * (width + softmax_width)) / (at["paged"] if paged else 1)
    turned_s = at.memory_s(8 * n_heads * seq_len * width) if is_backward else 0
    seconds: Number = np.hypot(math_s, operands_s) + turned_s + start_s
    return seconds


def grouped_s(shape: KernelShape, at: KernelRates) -> Number:
    """Returns the seconds of G products [M_g, K] x [K, N] with M rows in all: every group adds a tile of rows.

    On a TPU one core runs all groups. The weights of ``copied`` groups are read and written first.
    """
    num_terms, num_cols = padded(shape["K"], at.width), padded(shape["N"], at.width)
    weight_bytes = 2 * num_terms * num_cols
    num_rows = shape["M"] + shape["G"] * (at.width or (PAIRED_ROWS if at.family == "blackwell" else NVIDIA_TILE[0]))
    moved_s = at.memory_s(2 * shape["M"] * (num_terms + num_cols) + shape["G"] * weight_bytes)
    math_s = at.mosaic_s(2 * num_rows * num_terms * num_cols, num_terms, GROUP_COLUMNS) * (at.cores if at.width else 1)
    seconds: Number = np.hypot(math_s, moved_s) + at.memory_s(2 * shape["copied"] * weight_bytes) + at["start_s"]
    return seconds


def gated_s(shape: KernelShape, at: KernelRates, *, fused: bool) -> Number:
    """Returns the seconds of two products [M, K] x [K, N] and the gate. Unless ``fused`` both results are written in
    fp32 and read again, and if ``copied`` into another layout once more."""
    num_rows, num_terms, num_columns = shape["M"], padded(shape["K"], at.width), padded(shape["N"], at.width)
    result_bytes = (2 if fused else 2 + 16 + 8 * shape["copied"]) * num_rows * num_columns
    moved_s = at.memory_s(2 * (num_rows * num_terms + 2 * num_terms * num_columns) + result_bytes)
    flops = 4 * num_rows * num_terms * num_columns
    math_s = at.mosaic_s(flops, num_terms, GATE_COLUMNS) if fused else at.product_s(flops, num_terms)
    seconds: Number = np.hypot(math_s * at.waves(num_rows, num_columns), moved_s) + at["start_s"]
    return seconds


def loss_s(shape: KernelShape, at: KernelRates, *, phase: str = "forward") -> Number:
    """Returns the seconds of the loss and its product [M, K] x [K, N].

    On GPUs a separate kernel reads bf16 logits and writes as many bytes. On TPUs products and loss are fused: the
    softmax adds ``softmax`` to the K of the forward pass. The backward pass computes the logits again and has two more
    products; it writes the gradient of the weights in fp32, which XLA converts to another layout on TPUs.
    """
    num_rows, num_terms, num_columns = shape["M"], shape["K"], shape["N"]
    is_backward = phase == "backward"
    math_s = at.product_s(2 * (3 if is_backward else 1) * num_rows * num_terms * num_columns, num_terms)
    moved_bytes = (8 if at.width else 4) * num_terms * num_columns if is_backward else 0
    if not at.width:
        moved_bytes = moved_bytes + 4 * num_rows * num_columns
    elif not is_backward:
        math_s = math_s + 2 * num_rows * at["softmax"] * num_columns / at.flops_per_s
    seconds: Number = math_s + at.memory_s(moved_bytes) + at["start_s"]
    return seconds


def collective_s(shape: KernelShape, at: KernelRates) -> Number:
    """Returns the seconds of a collective over n GPUs of one switch; V is the bytes of the full array, of AllToAll each
    device's.

    A ring copies n chunks of V / n, or 2n - 1 for AllReduce; the last is only received, half the work. Short messages
    carry as many flags as bytes (NCCL's LL); longer ones fill a pipeline first, in ``ramp_s``. For 8 GPUs the switch
    may sum instead: V (n + 1) / n bytes. A step between neighbours takes ``member_s``; AllToAll has one step. On Hopper
    all times but those of bytes are multiplied by ``quick``.
    """
    num_members, is_all_reduce = shape["n"], shape["op"] == "all_reduce"
    num_copies = np.where(is_all_reduce, 2 * num_members - 1, num_members)
    chunk_s = shape["bytes"] / num_members / (at.link_bytes_per_s * at["link"])
    num_steps = np.where(shape["op"] == "alltoall", 1, num_copies - 1)
    ramp_s = at["ramp_s"] * at["quick"]
    sent_s = np.minimum(2 * num_copies * chunk_s, ramp_s + (num_copies - 0.5) * chunk_s)
    if at.family in NVLS:
        switch_s = ramp_s + (num_members + 1) * chunk_s / NVLS[at.family]
        sent_s = np.where(is_all_reduce & (num_members == 8), np.minimum(sent_s, switch_s), sent_s)
    seconds: Number = sent_s + at["quick"] * (at["collective_s"] + at["member_s"] * num_steps)
    return seconds


def generation_attention_s(shape: KernelShape, at: KernelRates) -> Number:
    """Returns the seconds of attention of B queries, one a sequence, to caches of T positions or a window of them.

    N heads and G kv heads have width H, entries of a cache ``bits``; a window of 0 is none. Bytes stream, and each kv
    head of a sequence takes an SM ``block_s`` at least. If these are fewer than SMs, caches are read in parts, which
    another kernel sums."""
    cached_len: Number = np.where(shape["window"] > 0, np.minimum(shape["T"], shape["window"]), shape["T"])
    num_blocks = shape["B"] * shape["G"]
    moved_bytes = num_blocks * cached_len * shape["H"] * shape["bits"] / 4 + 4 * shape["B"] * shape["N"] * shape["H"]
    is_merged = (num_blocks < at.processors) & (cached_len > SHORT)
    stream_s = np.hypot(at.memory_s(moved_bytes) / at["streams"], at["block_s"] * num_blocks / at.processors)
    seconds: Number = stream_s + at["decode_s"] + is_merged * at["start_s"]
    return seconds


def latent_attention_s(shape: KernelShape, at: KernelRates) -> Number:
    """Returns the seconds of attention of B queries with N heads to latent caches of T positions, ``bits`` an entry.

    All heads share a cache of 512 entries and 64 rotated ones. Reads of it overlap with products, which run in 8 bits
    for such a cache on Blackwell. Queries are read and written once before, by another kernel except on Blackwell. If
    tiles of heads are fewer than SMs, caches are read in parts: each SM writes an fp32 tile, which another kernel
    reads."""
    num_positions, latent_width = shape["B"] * shape["T"], sum(LATENT)
    read_s = at.memory_s(num_positions * latent_width * shape["bits"] / 8) / at["latent"]
    is_blackwell = at.family == "blackwell"
    speedup = np.where(is_blackwell & (shape["bits"] == 8), at.narrow_flops_per_s / at.flops_per_s, 1)
    math_s = at.product_s(2 * num_positions * padded(shape["N"], LATENT_TILE) * (latent_width + LATENT[0])) / speedup
    num_tiles = shape["B"] * np.ceil(shape["N"] / LATENT_TILE)
    num_parts = np.minimum(num_tiles * np.ceil(shape["T"] / LATENT_TILE), at.processors) * (num_tiles < at.processors)
    io_bytes = 2 * shape["B"] * shape["N"] * (3 * latent_width + LATENT[0])
    io_bytes = io_bytes + 8 * num_parts * np.minimum(shape["N"], LATENT_TILE) * LATENT[0]
    is_merged = not is_blackwell or (num_parts > 0) & (shape["T"] > SHORT)
    seconds: Number = np.maximum(math_s, read_s) + at.memory_s(io_bytes) + at["decode_s"] + is_merged * at["start_s"]
    return seconds


def experts_s(shape: KernelShape, at: KernelRates, *, bits: float = 16, blocks: bool = False) -> Number:
    """Returns the seconds of a layer of gated experts: M rows in all through G experts of three weights [K, N] each.

    Weights of the G experts are read once, with ``bits`` an entry; each computes a matrix instruction's rows more.
    Routing, sorting, gates and sums are separate kernels that take ``experts_s``; with 4 bits all are one call. With
    scales of ``blocks`` of entries Hopper has more kernels.
    """
    expert_params = 3 * shape["K"] * shape["N"]
    moved_s = at.memory_s(shape["G"] * expert_params * bits / 8 + shape["M"] * (8 * shape["K"] + 6 * shape["N"]))
    num_rows = shape["M"] + shape["G"] * MATRIX_ROWS.get(at.family, 64)
    math_s = 2 * num_rows * expert_params / (at.flops_per_s if bits > 8 else at.narrow_flops_per_s)
    casts_s = QUANTIZERS.get(at.family, 0) * blocks * at["start_s"]
    seconds: Number = np.hypot(math_s, moved_s) + (at["experts_s"] + casts_s if bits >= 8 else at["call_s"])
    return seconds


def small_reduce_s(shape: KernelShape, at: KernelRates) -> Number:
    """Returns the seconds of the sum of an array of V bytes over n GPUs by a kernel whose threads read peers' memory.

    It takes the faster of two methods. One shot reads all of every peer. Two shots read one part from every peer, then
    after a further barrier the sums of all other parts.
    """
    num_members, start_s = shape["n"], at["quick"] * at["reduce_s"]
    part_s = (num_members - 1) * shape["bytes"] / num_members / (at.link_bytes_per_s * at["peers"])
    seconds: Number = start_s + np.minimum(num_members * part_s, 2 * part_s + start_s)
    return seconds
