"""Converts a published measurement to a case: a setting and strategy of this package, and the measured seconds.

Where a source leaves something open, rules of `docs/accuracy.md` decide, which are equal for all sources.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from meshwright.accuracy.records import ModelShape, Record
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.progress import tracked
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.cost.work.ops import model_flops
from meshwright.spec.assumptions import Assumptions, AttentionKernel, Dispatch, Software
from meshwright.spec.chip import Chip, chip, peak
from meshwright.spec.cluster import Cluster, make_cluster
from meshwright.spec.cluster_shapes import balanced_shape
from meshwright.spec.job import Job
from meshwright.spec.model import Lora, Model
from meshwright.spec.strategy import Precision, Strategy, make_mesh, standard_assignment

_GIGABITS_PER_NODE = re.compile(r"\b([1-9]\d{0,6}) Gb/s inter-node")
_ROPE_DIM = 64
_MLA_HEAD = 128
"""Head widths of latent attention that records leave out: those of DeepSeek-V3's config.json."""

A3_HIGH_BYTES_PER_S = 12.5e9
"""Network rate per GPU of an A3 High machine: four 200 Gb/s cards for eight GPUs (Google Cloud's machine-type page)."""

PRECISIONS: dict[str, Precision | Literal[""]] = {
    "bf16": "",
    "fp16": "",
    "unstated": "",
    "fp8": "fp8",
    "float8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "fp4": "fp4",
    "int8": "int8",
}
"""Start of a record's precision -> dtype of products, "" for 16 bits; the rest of the precision is ignored."""

RECOMPUTE_COUNTED = ("counts recompute", "count recompute", "recompute FLOPs", "hardware FLOPs", "96Bsl")
"""Phrases of a record's note which mean that its FLOP/s count the recomputed forward pass."""

COMPILED_GPU = ("maxtext",)
"""Prefixes of groups whose GPUs run a step as one compiled program; other groups launch it kernel by kernel."""


WITHOUT_OVERLAP = ("MooreThreads/SimuMax",)
"""Sources whose instructions turn off every overlap of communication with compute."""

DISPATCHES: dict[str, Dispatch] = {
    "alltoall": "experts",
    "one_hot": "one_hot",
    "hybridep": "devices",
    "deepep": "devices",
}
"""Dispatcher of a recipe -> how tokens reach experts."""

NARROW_SUMS = ("megatron-bridge", "mlperf-train")
"""Prefixes of groups whose recipes sum gradients in bf16, and gather weights in fp8 where products are in fp8
(Megatron-Bridge: grad_reduce_in_fp32 False, fp8_param_gather; MLPerf: grad_sync_dtype bf16, FP8_PARAM_GATHER)."""

CAPTURED = ("_cg.sh", "_cg_fp4.sh", "_8b.sh", "_8b_fp4.sh")
"""Suffixes of MLPerf configurations that capture a step in CUDA graphs."""

NUM_FOLDS = 5
"""Number of folds in cross-validation."""
MIN_CHUNK_LAYERS = 2
"""Fewest layers of a pipeline chunk if the source does not print the number of chunks."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One record, ready to be predicted."""

    record: Record
    setting: Setting
    strategy: Strategy
    measured_s: float

    @property
    def chip(self) -> Chip:
        """The chip that was measured."""
        return self.setting.cluster.chip


class Unpredicted(msgspec.Struct, frozen=True, kw_only=True):
    """A record that is not predicted, and the reason."""

    record: Record
    reason: str


Made = TypeVar("Made")


def cases_of(
    records: Iterable[Record], make: Callable[[Record], Made]
) -> tuple[tuple[Made, ...], tuple[Unpredicted, ...]]:
    """Returns the results of ``make`` on records, and the records for which it raised a user error, with its text."""
    cases, refusals = list[Made](), list[Unpredicted]()
    for record in tracked(records, "reading records"):
        try:
            cases.append(make(record))
        except (InputError, CannotRunError) as error:
            refusals.append(Unpredicted(record=record, reason=str(error)))
    return tuple(cases), tuple(refusals)


def training_case(record: Record) -> Case:
    """Returns the case of a training record. Raises InputError or CannotRunError if it cannot be predicted."""
    if record.kind != "train":
        raise InputError(f"kind {record.kind}: only training is predicted in this version")
    if not record.model or not record.seq_len or not record.global_batch_seqs or record.n_chips < 1:
        missing_fields = [name for name in ("model", "seq_len", "global_batch_seqs") if not getattr(record, name)]
        raise InputError(f"no {' and no '.join(missing_fields or ['n_chips'])}")
    model, cluster = model_of(record.model, record.seq_len), cluster_of(record)
    if record.lora:
        model = msgspec.structs.replace(model, lora=Lora(**msgspec.structs.asdict(record.lora)))
    job = Job(batch_seqs=max(1, round(record.global_batch_seqs)), seq_len=record.seq_len)
    measured_s = measured_seconds(record, model, job, cluster.chip)
    strategy = strategy_of(record, model, cluster)
    peak(cluster.chip, strategy.matmul_dtype)  # a dtype that the chip lacks is a reason, not a fault of the file
    # the first candidate, whose mesh axes have whole physical axes, as libraries make device meshes; not the fastest
    placement = strategy_placements(cluster, strategy)[0].describe()
    strategy = msgspec.structs.replace(strategy, placement=placement)
    # published software sends filled expert slots only
    attention_kernel: AttentionKernel = "portable" if "ALiBi" in record.note else "tuned"
    recipe = record.recipe
    if recipe and recipe.narrow_attention:
        attention_kernel = "narrow"
    assumptions = Assumptions(
        software=_software(record),
        attention_kernel=attention_kernel,
        empty_slots=False,
        dispatch=DISPATCHES[recipe.dispatcher] if recipe else "experts",
        exchange_overlap=recipe is not None and recipe.exchange_overlap,
        narrow_gathers=record.group.startswith(NARROW_SUMS),
        scatters="once",
    )
    setting = Setting(model, cluster, job, assumptions=assumptions)
    return Case(record=record, setting=setting, strategy=strategy, measured_s=measured_s)


# -- model ----------------------------------------------------------------------------------------------


def model_of(shape: ModelShape, seq_len: int) -> Model:
    """Returns a record's model: llama blocks if the MLP is gated, else gpt2; experts, latents, windows if any."""
    model_fields: dict[str, Any] = {
        "name": shape.name,
        "family": "llama",
        "num_layers": shape.layers,
        "d_model": shape.d_model,
        "d_ff": shape.d_ff,
        "num_heads": shape.n_heads,
        "num_kv_heads": shape.n_kv_heads,
        "head_dim": shape.d_head,
        "vocab_size": shape.vocab,
        "max_positions": seq_len,
    }
    if not shape.gated_mlp:
        bias_flags = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
        model_fields |= {"family": "gpt2", "norm": "layer_norm", "gated": False, "activation": "gelu", **bias_flags}
        model_fields |= {"learned_positions": True, "tied_embeddings": True}
    if shape.moe:
        moe = shape.moe
        dense_layers = [n for n in range(shape.layers) if n < moe.first_k_dense or (n + 1) % moe.interleave]
        model_fields |= {
            "family": "qwen3_moe",
            "num_experts": moe.experts,
            "experts_per_token": moe.top_k,
            "d_ff_expert": moe.d_ff_expert,
            "num_shared_experts": moe.n_shared,
            "d_ff_shared": moe.n_shared * moe.d_ff_expert,
            "dense_layers": tuple(dense_layers),
        }
    if shape.attention == "mla":
        model_fields |= {
            "family": "deepseek_v3",
            "head_dim": _MLA_HEAD + _ROPE_DIM,
            "q_lora_rank": shape.q_lora_rank,
            "kv_lora_rank": shape.kv_lora_rank,
            "qk_nope_head_dim": _MLA_HEAD,
            "qk_rope_head_dim": _ROPE_DIM,
            "v_head_dim": _MLA_HEAD,
        }
    if shape.sliding_window:
        layer_ids = tuple(range(0, shape.layers, 2)) if "alternating" in shape.attention else tuple(range(shape.layers))
        model_fields |= {"sliding_window": shape.sliding_window, "sliding_layers": layer_ids}
    return Model(**model_fields)


# -- cluster --------------------------------------------------------------------------------------------


def cluster_of(record: Record) -> Cluster:
    """Returns a record's cluster: GPUs in the largest equal domains, TPUs in slices that are nearly cubic tori. Raises
    InputError if the chips do not divide into the slices."""
    record_chip = chip_of(record)
    if record_chip.topology == "torus":
        num_slices = record.slices or 1
        if record.n_chips % num_slices:
            raise InputError(f"{record.n_chips} chips do not divide into {num_slices} slices")
        return make_cluster(record_chip, _torus_shape(record_chip, record.n_chips // num_slices), num_slices=num_slices)
    # the domain must divide the chips: of the 72 chips of a rack, 64 for 128
    max_domain_chips = min(record_chip.domain_chips or record.n_chips, record.n_chips)
    domain_chips = max(num_chips for num_chips in range(1, max_domain_chips + 1) if record.n_chips % num_chips == 0)
    return make_cluster(record_chip, (domain_chips, record.n_chips // domain_chips))


def _torus_shape(chip: Chip, num_chips: int) -> tuple[int, ...]:
    """Returns the shape closest to a cube, made of whole optically switched cubes if possible."""
    num_axes, cube_side = chip.num_ici_axes or 1, chip.wrap_multiple or 1
    if num_axes == 3 and num_chips % cube_side**num_axes == 0:
        return tuple(cube_side * num_cubes for num_cubes in balanced_shape(num_chips // cube_side**num_axes, num_axes))
    return balanced_shape(num_chips, num_axes)


def chip_of(record: Record) -> Chip:
    """Returns the chip of the catalogue that a record names, with the network rate that its note states, if any."""
    chip_name = record.hardware.lower().replace("_", "-")
    for affix in ("tpu-", "-sxm2-32gb", "-sxm-80gb", "-sxm", "-nvl72", "(ironwood)"):
        chip_name = chip_name.replace(affix, "-40gb" if (affix == "-sxm" and chip_name.endswith("-40gb")) else "")
    chip_name = {"a100-40gb-40gb": "a100-40gb", "v4": "v4p", "v7x": "tpu7x"}.get(chip_name, chip_name)
    named_chip = chip(chip_name)
    rate_match = _GIGABITS_PER_NODE.search(record.note)
    bytes_per_s = None
    if rate_match:
        bytes_per_s = float(rate_match[1]) / 8 * 1e9 / (named_chip.chips_per_host or 8)
    elif "A3-High" in record.note:
        bytes_per_s = A3_HIGH_BYTES_PER_S
    return named_chip if bytes_per_s is None else msgspec.structs.replace(named_chip, nic_bytes_per_s=bytes_per_s)


# -- strategy -------------------------------------------------------------------------------------------


def strategy_of(record: Record, model: Model, cluster: Cluster) -> Strategy:
    """Returns the record's parallelism as a strategy, by the rules in `docs/accuracy.md`. Raises InputError if it does
    not divide the chips, or for an unknown precision."""
    degrees = record.parallelism
    is_tpu = cluster.kind == "torus"
    sizes = {"pipeline": degrees.pp or 1, "context": degrees.cp or 1, "tensor": degrees.tp or 1}
    num_replicas = record.n_chips // math.prod(sizes.values())
    if num_replicas * math.prod(sizes.values()) != record.n_chips:
        degrees_text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise InputError(f"{degrees_text} do not divide {record.n_chips} chips")
    ep_size = math.gcd(degrees.ep or 1, num_replicas) if model.num_experts else 1
    zero = degrees.zero_stage or 0
    if record.group.startswith("mlperf-train"):
        zero = max(zero, 1)  # USE_DIST_OPTIMIZER of NVIDIA's config_common.sh, which all MLPerf recipes read
    outer = _outer_replicas(record, cluster, num_replicas // ep_size) if zero == 3 else 1
    sizes |= {"expert": ep_size}
    sizes |= {"fsdp": num_replicas // ep_size // outer, "data": outer} if zero else {"data": num_replicas // ep_size}
    seqs_per_step = record.global_batch_seqs or 1
    precision_prefix = next((prefix for prefix in PRECISIONS if record.precision.lower().startswith(prefix)), None)
    if precision_prefix is None:
        raise InputError(f"precision {record.precision!r} is not known")
    chunks_per_device = _chunks(record, model, sizes["pipeline"])
    is_narrow_sum = record.group.startswith(NARROW_SUMS) or record.precision == "fp16"  # stacks of 2021 sum in fp16
    return Strategy(
        mesh=make_mesh(sizes),
        assignment=standard_assignment(zero=zero, sequence_parallel=bool(degrees.sp) or is_tpu or sizes["tensor"] == 1),
        context_attention="ulysses" if "CP uses a2a" in record.note else "gather",
        remat=_remat(record),
        num_microbatches=_microbatches(record, num_replicas, seqs_per_step, is_tpu),
        schedule="interleaved" if chunks_per_device > 1 else "1f1b",
        chunks=chunks_per_device,
        state="bf16-master" if is_tpu or is_narrow_sum else "bf16-master-fp32-grads",
        precision=PRECISIONS[precision_prefix] or ("" if _wide(cluster.chip) == "bf16" else "fp16"),
        capacity_factor=record.recipe.capacity_factor if record.recipe else 0.0,
    )


def _software(record: Record) -> Software:
    """Returns the software: "compiled" on TPUs and for MaxText, "eager-2021" for fp16, else eager or captured."""
    if record.hardware.startswith("TPU") or record.group.startswith(COMPILED_GPU):
        return "compiled"
    if any(source_name in record.source for source_name in WITHOUT_OVERLAP):
        return "eager-in-turn"
    if record.precision == "fp16":
        return "eager-2021"
    graph_scope = record.recipe.graphs if record.recipe else "none"
    if graph_scope == "step" or record.config.endswith(CAPTURED):
        return "captured"
    return "captured-layers" if graph_scope == "layers" else "eager"


def _chunks(record: Record, model: Model, num_stages: int) -> int:
    """Returns the pipeline chunks per device as stated, or the most of `MIN_CHUNK_LAYERS` layers if not printed."""
    if num_stages == 1 or not ("VPP" in record.note and "not printed" in record.note):
        return record.parallelism.vpp or 1
    depth = model.num_layers // num_stages
    return max((n for n in range(1, depth + 1) if depth % n == 0 and depth // n >= MIN_CHUNK_LAYERS), default=1)


def _outer_replicas(record: Record, cluster: Cluster, num_replicas: int) -> int:
    """Returns the number of FSDP replicas: slices, or nodes if the note says that FSDP stays in a node, else 1."""
    if cluster.kind == "torus":
        return math.gcd(cluster.num_slices, num_replicas)
    shards_match = re.search(r"FSDP (\d+) in node", record.note)
    return num_replicas // int(shards_match[1]) if shards_match and num_replicas % int(shards_match[1]) == 0 else 1


def _microbatches(record: Record, num_replicas: int, seqs_per_step: float, is_tpu: bool) -> int:
    """Returns the number of microbatches from their stated size; unstated, they have one sequence in a pipeline, else
    there is 1 microbatch.

    On TPUs it is 1: the batches that MaxText states are per chip, and it accumulates nothing."""
    if is_tpu:
        return 1
    has_pipeline = (record.parallelism.pp or 1) > 1
    microbatch_seqs = record.micro_batch or (1 if has_pipeline else seqs_per_step / num_replicas)
    return max(1, round(seqs_per_step / (num_replicas * microbatch_seqs)))


def _wide(chip: Chip) -> str:
    """Returns the 16-bit dtype of a chip's products: bf16, or fp16 on a chip without bf16 (V100)."""
    return "bf16" if "bf16" in chip.peak_flops else "fp16"


_FULL_IF_EAGER = "every-1"
"""Remat policy for full recompute in eager software, which reruns whole layers; compilers drop unused ops."""


def _remat(record: Record) -> str | tuple[str, ...]:
    """Returns the remat policy of a record, "none" unless it states recompute.

    Eager software's "selective" recomputes attention scores; attention here always does, so that maps to "none"."""
    recompute, policy, compiled = record.recompute or "none", record.remat_policy or "", _software(record) == "compiled"
    if recompute == "full":
        return "block" if compiled else _FULL_IF_EAGER
    if recompute != "selective" or not compiled:
        return "none"
    if record.hardware.startswith("TPU"):
        if "qkv+out" in policy:
            return ("qr", "kr", "v", "a", "logits")
        return ("logits",) if "(offload decoder_layer_input)" in policy else ("qr", "kr", "v", "logits")
    return "selective"


# -- what was measured ----------------------------------------------------------------------------------


def measured_seconds(record: Record, model: Model, job: Job, chip: Chip) -> float:
    """Returns the seconds of a step: as measured, else from throughput, else from utilisation and the source's FLOPs.

    Raises InputError if the record has no step time, throughput or utilisation."""
    measurement, step_tokens = record.measured, job.tokens_per_step
    if measurement.step_s:
        return measurement.step_s
    if measurement.tokens_per_s:
        return step_tokens / measurement.tokens_per_s
    if measurement.tokens_per_s_per_chip:
        return step_tokens / measurement.tokens_per_s_per_chip / record.n_chips
    chip_tflops = measurement.tflops_per_chip
    chip_flops_per_s = chip_tflops * 1e12 if chip_tflops else (measurement.mfu or 0.0) * peak(chip, _wide(chip))
    if not chip_flops_per_s:
        raise InputError("no step time, throughput or utilisation was measured")
    counted_flops = model_flops(model, job)
    if any(phrase in record.note for phrase in RECOMPUTE_COUNTED):
        d_model, layers = model.d_model, model.num_layers
        shares = 1 + job.seq_len / (6 * d_model) + model.vocab_size / (16 * layers * d_model)
        counted_flops = 96.0 * step_tokens * layers * d_model**2 * shares
    return counted_flops / chip_flops_per_s / record.n_chips
