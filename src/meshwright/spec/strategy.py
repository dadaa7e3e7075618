"""A strategy: the mesh axes that shard each dim, and all other choices of a run."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec

from meshwright.core.dims import DTYPE_BYTES, ISLANDS, MESH_AXES
from meshwright.core.errors import InputError, nearest, require_known
from meshwright.core.fields import Checked

Rules = dict[str, tuple[str, ...]]
"""Dim -> mesh axes, in order of precedence: an axis goes to the first listed dim that an array has."""

ROLES: tuple[str, ...] = (
    *("activation", "weight", "vector", "grad", "optimizer", "input", "position"),
    *("cache", "output"),
)
REMATS: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "selective": (
        *("qr", "kr", "v", "o", "x1", "g", "u", "logits"),
        *("r", "xe", "ge", "ue", "gs", "us", "cq", "ckv"),
    ),
    "matmuls": (
        *("q", "k", "v", "a", "g", "u", "logits"),
        *("r", "ge", "ue", "ye", "gs", "us", "ys", "cq", "ckv", "kn", "kpe"),
    ),
    "block": ("logits",),
    "sqrt": None,
    "full": (),
    "recompute-all": (),
}
"""Remat policy -> results kept for the backward pass besides each block's input. None keeps every result and every
gathered activation: under "none" of the whole model, under "sqrt" and "every-C" of the segment that is being
recomputed. "recompute-all" and "recompute-C" keep only the input of a segment. The loss head keeps everything but its
logits under every policy."""

REMAT_POLICIES: tuple[str, ...] = tuple(REMATS)
RERUN_POLICIES = ("recompute-2", "recompute-4", "recompute-8", "recompute-all")
"""Policies that are tried only if no other policy fits: each layer runs forward again for many later layers."""
USUAL_POLICIES = tuple(policy for policy in REMAT_POLICIES if policy not in RERUN_POLICIES)
"""All other remat policies; the last one keeps the fewest results."""
ALL_LAYERS = 9999
"""Length of a segment that has all layers of a device's chunk."""
_SEGMENTS = re.compile(r"(every|recompute)-([1-9]\d{0,3})")

Form = Literal["shard_map", "gspmd"]
"""How a step is executed: its derived steps ("shard_map"), or its shardings as constraints from which the compiler
chooses the collectives ("gspmd")."""

ContextAttention = Literal["gather", "ring", "ulysses"]
Precision = Literal["bf16", "fp16", "fp8", "fp4", "int8", "fp32"]
Offload = Literal["optimizer", "activations"]
GradientSync = Literal["overlapped", "naive", "bucketed"]
"""When gradients are summed over replicas: "overlapped" sums a layer's during the backward pass of the layer before it,
"naive" sums all after the backward pass, "bucketed" does so in buckets of many layers, to save launches."""

CollectiveMatmul = Literal["none", "one-way", "two-way"]
"""How products overlap their AllGather or ReduceScatter over ``tensor`` tile by tile: not at all ("none"), on a ring in
one direction ("one-way"), or in halves in both directions ("two-way")."""

IslandsSync = Literal["gradients", "diloco", "local-sgd", "async-sgd"]
"""What islands exchange: "gradients" sums gradients in every step (elastic data parallelism). The other kinds send the
change of weights every ``outer_every`` steps: to an outer optimizer with momentum ("diloco"), to average the weights
("local-sgd"), or whenever an island is ready, without waiting for other islands ("async-sgd")."""

ISLAND_FIELDS: dict[str, Any] = {
    **{"islands_sync": "gradients", "outer_every": 1, "outer_bits": 32, "outer_fragments": 1, "outer_overlap": 0}
}
"""Field of the strategy that only several islands have -> its default, which a single island has."""
_WITHOUT: dict[str, tuple[tuple[str, ...], str]] = {
    "gradients": (tuple(ISLAND_FIELDS)[1:], "gradients are summed whole in every step, in 32 bits"),
    "async-sgd": (("outer_fragments", "outer_overlap"), "an island sends all weights at once"),
}

COLLECTIVE_MATMULS: tuple[CollectiveMatmul, ...] = get_args(CollectiveMatmul)

STATE_BYTES: dict[str, dict[str, float]] = {
    "bf16-adam": {"weights": 2, "gradients": 2, "optimizer": 8, "counted": 10},
    "bf16-master": {"weights": 2, "gradients": 2, "optimizer": 12, "counted": 16},
    "bf16-master-fp32-grads": {"weights": 2, "gradients": 4, "optimizer": 12, "counted": 18},
    "bf16-master-both-grads": {"weights": 2, "gradients": 6, "optimizer": 12, "counted": 20},
    "fp32": {"weights": 4, "gradients": 4, "optimizer": 8, "counted": 16},
    "pure-16bit": {"weights": 2, "gradients": 2, "optimizer": 4, "counted": 8},
}
"""Bytes per parameter of each training state. ``counted`` is the total that is usually quoted: for bf16-adam (How to
Scale Your Model, section 5.1.1) it leaves out the short-lived bf16 gradient."""

MAX_SEQUENCES = 2**40
"""Bound on sequences and microbatches, far above any job, so that sizes stay whole in floating point."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes over which the sequences of a batch are split."""

_TENSOR_DIMS = ("N", "K", "F", "Fe", "Fs", "V")
REPEATED_HEADS: dict[str, tuple[str, ...]] = {
    "Kt": ("tensor",),
    "Kct": ("context", "tensor"),
    "Kft": ("tensor",),
    "Kfct": ("context", "tensor"),
}
"""Dim of repeated kv heads -> mesh axes that split it. Its size is the least common multiple of K, or Kf, and the
devices of these axes."""

SPLIT_AS = {"H": "Hf", "F": "Fw", "K": "Kf", "Kt": "Kft", "Kct": "Kfct"}
"""Dim -> letter of this dim in layers that have another size of it. Rules for the first apply to both."""
_SHARDED_DIMS = ("D", "Rq", "Rkv")


def standard_assignment(*, zero: int = 3, sequence_parallel: bool = True) -> dict[str, Rules]:
    """Returns rules for a stream x[B_{data,fsdp,expert}, T_{context,tensor}, D] and weights W[D_{fsdp,..}, F_tensor].

    ``zero`` says what the axis ``fsdp`` splits besides the batch: 3 weights, gradients and optimizer; 2 gradients and
    optimizer; 1 the optimizer; 0 nothing. Without ``sequence_parallel`` the stream is whole over ``tensor`` between
    blocks. ``expert`` splits the dim E of expert weights; the other weights use that axis, and ``context``, as further
    ``fsdp`` axes. Roles that are left out (grad, optimizer) follow ``weight``. Raises InputError for another ``zero``.
    """
    if zero not in (0, 1, 2, 3):
        raise InputError(f"zero={zero} is not a stage. Use 0, 1, 2 or 3.")
    split_rules = _weight_rules(("fsdp", "expert", "context"))
    rules_by_role: dict[str, Rules] = {
        "activation": {
            **dict.fromkeys(_TENSOR_DIMS, ("tensor",)),
            "B": BATCH_AXES,
            "E": ("expert",),
            "C": ("data", "fsdp", "context", "tensor") if sequence_parallel else ("data", "fsdp", "context"),
            "T": ("context", "tensor") if sequence_parallel else ("context",),
        },
        "weight": split_rules if zero == 3 else _weight_rules(()),
        "vector": {},
        "input": {"B": BATCH_AXES, "T": ("context",)},
        "position": {"B": BATCH_AXES},
    }
    if zero == 2:
        rules_by_role |= {"grad": split_rules}
    if zero in (1, 2):
        rules_by_role |= {"optimizer": split_rules}
    return rules_by_role


def _weight_rules(axes: tuple[str, ...]) -> Rules:
    """Returns rules that shard heads and widths over ``tensor``, experts over ``expert``, D and ranks over ``axes``."""
    return {
        "E": ("expert",),
        **dict.fromkeys(_TENSOR_DIMS, ("tensor",)),
        **dict.fromkeys(_SHARDED_DIMS, axes),
    }


GENERATION_RULES: dict[str, Rules] = {
    "cache": {"B": BATCH_AXES, "K": ("tensor",)},
    "output": {"B": BATCH_AXES},
}
"""Default rules for cached keys and values and for output logits in generation: each device caches the sequences and
heads that it computes, and has all logits of its sequences."""

CacheSplit = Literal["sequences", "positions"]


def cache_assignment(split: CacheSplit) -> dict[str, Rules]:
    """Returns rules for engines with more devices than kv heads: ``context`` splits weights as ``tensor`` does,
    W[D, F_{tensor,context}], but caches over the sequences, [B_context, S, K_tensor, H], or over the positions S.

    Source: How to Scale Your Model, section 7.3.3.
    """
    rules_by_role = standard_assignment(zero=0)
    head_rules: Rules = {**dict.fromkeys(_TENSOR_DIMS, ("tensor", "context")), "K": ("tensor",)}
    row_axes = (*BATCH_AXES, "context") if split == "sequences" else BATCH_AXES
    position_rules: Rules = {"S": ("context",)} if split == "positions" else {}
    cache_rules: Rules = {"B": row_axes, **position_rules, "K": ("tensor",)}
    # a device needs all tokens for its part of the vocabulary
    rules_by_role |= {"input": {"B": BATCH_AXES}, "cache": cache_rules}
    return rules_by_role | {role: {**rules_by_role[role], **head_rules} for role in ("activation", "weight")}


def stationary_assignment() -> dict[str, Rules]:
    """Returns rules for weights W[D_context, F_tensor] that are split over both dims and never gathered, and a stream
    x[B, T, D_{context,tensor}]: each product sums over one axis and scatters its result over the other.

    ``context`` splits sequences in attention and its caches. Sources: How to Scale Your Model, section 7.6.2; Pope et
    al. (2022), section 3.2.2.
    """
    rules_by_role = standard_assignment(zero=0)
    row_axes, wide_dims = (*BATCH_AXES, "context"), ("F", "Fe", "Fs")
    activation_rules: Rules = {
        "D": ("context", "tensor"),
        **dict.fromkeys(_TENSOR_DIMS, ("tensor",)),
        **dict.fromkeys(wide_dims, ("tensor", "context")),
        "E": ("expert",),
        "B": row_axes,
        "C": ("data", "fsdp"),
    }
    weight_rules: Rules = {**_weight_rules(()), "D": ("context",)}
    rules_by_role |= {"activation": activation_rules, "weight": weight_rules, "input": {"B": BATCH_AXES}}
    return rules_by_role | {"cache": {"B": row_axes, "K": ("tensor",)}}


DEFAULT_ASSIGNMENT: dict[str, Rules] = standard_assignment()
"""The standard assignment with everything sharded (ZeRO-3)."""

LAYOUTS: dict[str, dict[str, Rules]] = {
    "prompts": standard_assignment(zero=0),
    "sequences": cache_assignment("sequences"),
    "positions": cache_assignment("positions"),
    "widths": stationary_assignment(),
    "gathered": DEFAULT_ASSIGNMENT,
}
"""Layout of an engine -> assignment. "prompts" and "gathered": ``context`` splits positions of a prompt, for engines
that only prefill; "gathered" also splits D of weights, which each layer gathers (FSDP). "sequences" and "positions":
``context`` splits weights as ``tensor`` does, and caches over what the name says. "widths": it splits D of weights."""


class Strategy(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one job is split: plain data that is priced, executed, verified and drawn.

    ``mesh`` lists the axes major to minor with their sizes. ``placement`` maps each axis to a text that names its
    physical links. ``assignment`` maps roles of arrays to `Rules`; products slice over ``slice_axes`` where they
    would gather (`algebra.einsum`). ``context_attention`` says how keys and values reach the queries of other devices
    over ``context``. ``remat`` is a policy ("every-4" and "recompute-4" keep the input of every fourth layer, "sqrt" of
    every sqrt(L)-th) or a list of results to keep. ``num_microbatches`` divides the sequences of a step; gradients are
    summed over them. ``schedule`` orders the passes of the pipeline, in which each device has ``chunks`` runs of
    layers. ``state`` is a key of `STATE_BYTES`. ``gradient_sync`` says when replicas sum their gradients,
    ``bucket_bytes`` is the size of a bucket. With ``prefetch`` the weights of the next layer are gathered while one
    computes, and the last layer's weights stay gathered until its backward pass. ``collective_matmul`` says how
    products of a layer hide the collectives of activations over ``tensor``. ``precision`` is the dtype of matrix
    products, "" for the state's dtype. ``offload`` lists what is kept in host memory. ``capacity_factor`` bounds the
    slots of an expert at that multiple of the mean load; tokens that find no slot are dropped. 0 sets no bound.

    With several ``islands`` the other axes are the mesh of each island, and ``islands_sync`` is what islands exchange:
    gradients in every step, or outer gradients every ``outer_every`` steps, of ``outer_bits`` bits, in
    ``outer_fragments`` fragments sent at different steps, each applied ``outer_overlap`` steps after it was sent.
    """

    mesh: dict[str, int]
    placement: dict[str, str] = msgspec.field(default_factory=dict)
    assignment: dict[str, Rules] = msgspec.field(default_factory=lambda: DEFAULT_ASSIGNMENT)
    slice_axes: tuple[str, ...] = ()
    context_attention: ContextAttention = "gather"
    remat: str | tuple[str, ...] = "block"
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    state: str = "bf16-adam"
    gradient_sync: GradientSync = "overlapped"
    bucket_bytes: int = 25 * 2**20
    prefetch: bool = False
    collective_matmul: CollectiveMatmul = "none"
    precision: Precision | Literal[""] = ""
    offload: tuple[Offload, ...] = ()
    capacity_factor: float = 0.0
    islands_sync: IslandsSync = "gradients"
    outer_every: int = 1
    outer_bits: Literal[32, 8, 4] = 32
    outer_fragments: int = 1
    outer_overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in self.assignment:
            if role not in ROLES:
                raise InputError(f"strategy.assignment has the unknown role {role!r}.{nearest(role, ROLES)}")
        if isinstance(self.remat, str) and self.remat not in REMAT_POLICIES and not _SEGMENTS.fullmatch(self.remat):
            raise InputError(
                f"remat {self.remat!r} is not a policy.{nearest(self.remat, REMAT_POLICIES)} "
                f"every-C, recompute-C and a list of result names are also taken."
            )
        for name in ("chunks", "bucket_bytes"):
            if not 1 <= getattr(self, name) <= MAX_SEQUENCES:
                raise InputError(f"strategy.{name}={getattr(self, name)} must be at least 1.")
        if self.capacity_factor and not 1 <= self.capacity_factor <= MAX_SEQUENCES:
            reason = f"strategy.capacity_factor={self.capacity_factor:g} drops tokens however even the load is"
            raise InputError(f"{reason}. Give at least 1, or 0 for no bound.")
        require_known("state", self.state, STATE_BYTES)
        if not 1 <= self.num_microbatches <= MAX_SEQUENCES:
            raise InputError(f"num_microbatches={self.num_microbatches} must be between 1 and {MAX_SEQUENCES}.")
        require_mesh(self.mesh)
        for axis in self.slice_axes:
            if axis not in self.mesh:
                raise InputError(f"strategy.slice_axes names {axis!r}, no mesh axis.{nearest(axis, self.mesh)}")
        _check_islands(self)

    @property
    def num_islands(self) -> int:
        """Number of islands: replicas with separate runtimes, each with a mesh of all other axes."""
        return self.mesh.get(ISLANDS, 1)

    def inner(self) -> "Strategy":
        """Returns the strategy of one island; the strategy itself if it has one island."""
        if self.num_islands == 1:
            return self
        mesh = {axis: size for axis, size in self.mesh.items() if axis != ISLANDS}
        placement = {axis: place for axis, place in self.placement.items() if axis != ISLANDS}
        return msgspec.structs.replace(self, mesh=mesh, placement=placement, **ISLAND_FIELDS)

    @property
    def num_chips(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def active_axes(self) -> tuple[str, ...]:
        """Axes of more than one device, major to minor."""
        return tuple(axis for axis, size in self.mesh.items() if size > 1)

    @property
    def state_dtype(self) -> str:
        """The dtype of weights and activations in the training state."""
        return "fp32" if STATE_BYTES[self.state]["weights"] == DTYPE_BYTES["fp32"] else "bf16"

    @property
    def matmul_dtype(self) -> str:
        """The dtype of the operands of matrix products: ``precision`` or, if "", `state_dtype`."""
        return self.precision or self.state_dtype

    @property
    def ring_ways(self) -> int:
        """Number of ring directions of a collective matmul, 1 or 2; 0 without collective matmuls."""
        return COLLECTIVE_MATMULS.index(self.collective_matmul)

    @property
    def kept_names(self) -> tuple[str, ...] | None:
        """Results kept for the backward pass besides each block's input; None for all, see `REMATS`."""
        if self.recomputes_each:
            return ()
        return REMATS.get(self.remat) if isinstance(self.remat, str) else self.remat

    @property
    def segment(self) -> int | Literal["sqrt"] | None:
        """Layers from one kept input to the next; None for policies without segments.

        "every-1" runs all of each layer again, as checkpointing libraries do; "block" only what its backward uses."""
        if self.remat in ("sqrt", "recompute-all"):
            return "sqrt" if self.remat == "sqrt" else ALL_LAYERS
        match = _SEGMENTS.fullmatch(self.remat) if isinstance(self.remat, str) else None
        return int(match[2]) if match else None

    @property
    def recomputes_each(self) -> bool:
        """True if each layer's backward pass runs all earlier layers of its segment again, so that only one layer's
        input exists besides the segment's; False if a segment runs again once and keeps every result."""
        return isinstance(self.remat, str) and self.remat.startswith("recompute-")

    @property
    def zero(self) -> int | None:
        """The ZeRO stage whose standard assignment this is; None for another assignment."""
        for stage in (3, 2, 1, 0):
            for sequence_parallel in (True, False):
                if self.assignment == standard_assignment(zero=stage, sequence_parallel=sequence_parallel):
                    return stage
        return None

    def rules(self, role: str) -> Rules:
        """Returns the rules of a role, also for dims of `SPLIT_AS`. Without rules, grad and optimizer have weight's,
        cache and output `GENERATION_RULES`, and all other roles {}."""
        fallback_role = "weight" if role in ("grad", "optimizer") else role
        rules = self.assignment.get(role, self.assignment.get(fallback_role, GENERATION_RULES.get(role, {})))
        pairs = (((dim, axes), (SPLIT_AS.get(dim, dim), axes)) for dim, axes in rules.items())
        return dict(item for pair in pairs for item in pair)


def _check_islands(strategy: Strategy) -> None:
    """Raises InputError if a field of the exchange is out of range, or excluded by one island or ``islands_sync``."""
    values, mode, every = {n: getattr(strategy, n) for n in ISLAND_FIELDS}, strategy.islands_sync, strategy.outer_every
    for name in (name for name, usual in ISLAND_FIELDS.items() if values[name] != usual):
        if strategy.num_islands == 1:
            raise InputError(f"strategy.{name}={values[name]} needs several islands. Set strategy.islands too.")
        fixed_names, reason = _WITHOUT.get(mode, ((), ""))
        if name in fixed_names:
            raise InputError(f"strategy.{name}={values[name]}: with islands_sync={mode} {reason}. Leave it out.")
    period = every // max(1, strategy.outer_fragments)  # one sum is in flight at a time
    for name, most in {"outer_every": MAX_SEQUENCES, "outer_fragments": every, "outer_overlap": period - 1}.items():
        if not ISLAND_FIELDS[name] <= values[name] <= most:
            suffix = f" with outer_every={every}" * (name != "outer_every")
            suffix += f" and outer_fragments={strategy.outer_fragments}" * (name == "outer_overlap")
            limits_text = f"between {ISLAND_FIELDS[name]} and {most}{suffix}"
            raise InputError(f"strategy.{name}={values[name]} must be {limits_text}.")


def sequence_shards(strategy: Strategy, dim: str = "B") -> int:
    """Returns the number of devices over which the cached sequences of an engine are split or, with ``dim`` S, over
    which the cached positions of a sequence are."""
    return math.prod(strategy.mesh[axis] for axis in strategy.rules("cache").get(dim, ()))


def mesh_words(mesh: Mapping[str, int], join: str = ", ", *, alone: str = "one device") -> str:
    """Returns the axes with several devices as ``"fsdp 1024, tensor 4"``; ``alone`` if there are none."""
    return join.join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or alone


SHORT_AXES = {
    ISLANDS: "isl",
    "pipeline": "pp",
    "data": "dp",
    "fsdp": "fsdp",
    "expert": "ep",
    "context": "cp",
    "tensor": "tp",
}


def short_mesh(mesh: Mapping[str, int]) -> str:
    """Returns the axes with several devices as ``"dp8 fsdp64 tp4"``, major to minor; ``"1 chip"`` without any."""
    return " ".join(f"{SHORT_AXES[axis]}{size}" for axis, size in mesh.items() if size > 1) or "1 chip"


def make_mesh(axes: Mapping[str, int]) -> dict[str, int]:
    """Returns a mesh with every axis in the order of `MESH_AXES`, 1 where not given; ``islands`` only if above 1.

    Raises InputError for an axis that does not exist, and for a size below 1.
    """
    for axis in axes:
        require_known("mesh axis", axis, MESH_AXES)
    require_mesh(axes)
    return {axis: int(axes.get(axis, 1)) for axis in MESH_AXES if axis != ISLANDS or axes.get(axis, 1) > 1}


def held_dims(dims: Mapping[str, Any], mesh: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's dims with the sizes that a mesh needs: V padded to a multiple of ``tensor``, and the dims of
    `REPEATED_HEADS` added. If sizes of the mesh are arrays, the sizes of V and of repeated heads are arrays too."""
    import numpy as np  # start-up does without it

    num_parts = mesh.get("tensor", 1)
    size_by_dim = {**dims, "V": -(-dims["V"] // num_parts) * num_parts}
    own_dims = {dim: "Kf" if dim.startswith("Kf") else "K" for dim in REPEATED_HEADS}
    for dim, axes in ((dim, axes) for dim, axes in REPEATED_HEADS.items() if own_dims[dim] in dims):
        num_devices = math.prod(mesh.get(axis, 1) for axis in axes)
        num_heads = np.lcm(int(dims[own_dims[dim]]), np.asarray(num_devices, dtype=np.int64))
        size_by_dim[dim] = num_heads if num_heads.ndim else int(num_heads)
    return size_by_dim


def require_mesh(mesh: Mapping[str, int]) -> None:
    """Raises InputError for an axis whose size is below 1."""
    for axis, size in mesh.items():
        if size < 1:
            raise InputError(f"mesh axis {axis}={size} must be at least 1. Leave it out if it is not wanted.")


def assign(rules: Rules, dims: tuple[str, ...], *, keep: Iterable[str] | None = None) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dim of an array under ``rules``; only axes in ``keep`` if that is given."""
    kept_axes = None if keep is None else set(keep)
    used_axes: set[str] = set()
    axes_by_dim: dict[str, tuple[str, ...]] = {}
    for dim, axes in rules.items():
        if dim not in dims:
            continue
        free_axes = tuple(axis for axis in axes if axis not in used_axes and (kept_axes is None or axis in kept_axes))
        used_axes.update(free_axes)
        axes_by_dim[dim] = free_axes
    return tuple(axes_by_dim.get(dim, ()) for dim in dims)
