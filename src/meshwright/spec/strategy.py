"""A strategy: which mesh axes split which dims, and the choices that go with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest

Rules = dict[str, tuple[str, ...]]
"""Dim -> mesh axes, in order of precedence: an axis goes to the first listed dim that an array has."""

ROLES: tuple[str, ...] = ("activation", "weight", "vector", "grad", "optimizer", "input", "position")
REMAT_POLICIES: tuple[str, ...] = ("none", "selective", "matmuls", "block", "full")

STATE_BYTES: dict[str, dict[str, float]] = {
    "bf16-adam": {"weights": 2, "gradients": 2, "optimizer": 8, "counted": 10},
    "bf16-master": {"weights": 2, "gradients": 2, "optimizer": 12, "counted": 16},
    "bf16-master-fp32-grads": {"weights": 2, "gradients": 4, "optimizer": 12, "counted": 18},
    "bf16-master-both-grads": {"weights": 2, "gradients": 6, "optimizer": 12, "counted": 20},
    "fp32": {"weights": 4, "gradients": 4, "optimizer": 8, "counted": 16},
    "pure-16bit": {"weights": 2, "gradients": 2, "optimizer": 4, "counted": 8},
}
"""Bytes per parameter of each training state. ``counted`` is the number the option is known by: for
bf16-adam (How to Scale Your Model, section 5.1.1) it leaves the short-lived bf16 gradient out."""

MAX_SEQUENCES = 2**40
"""Bound on sequences and microbatches, far above any job, so that sizes stay whole in floating point."""

RUNNABLE_STATES: tuple[str, ...] = ("bf16-adam", "fp32")
"""Training states that are executed in this version; the others are only counted."""

DEFAULT_ASSIGNMENT: dict[str, Rules] = {
    "activation": {
        "N": ("tensor",),
        "K": ("tensor",),
        "F": ("tensor",),
        "V": ("tensor",),
        "B": ("data", "fsdp"),
        "T": ("context", "tensor"),
    },
    "weight": {
        "V": ("tensor",),
        "N": ("tensor",),
        "K": ("tensor",),
        "F": ("tensor",),
        "D": ("fsdp", "context"),
    },
    "vector": {},
    "input": {"B": ("data", "fsdp"), "T": ("context",)},
    "position": {"B": ("data", "fsdp")},
}
"""The product's own: residual stream x[B_{data,fsdp}, T_{context,tensor}, D], weights W[D_{fsdp,context}, F_tensor].
Roles that are left out (grad, optimizer) follow ``weight``."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one job is split: plain data, made once, then costed, executed, verified and drawn.

    ``mesh`` lists the axes major to minor with their sizes. ``placement`` says where each axis lies on the
    physical network, one text per axis. ``remat`` is a policy name or a list of result names that are kept.
    ``num_microbatches`` divides the sequences of a step; gradients are summed over them.
    """

    mesh: dict[str, int]
    placement: dict[str, str] = {}
    assignment: dict[str, Rules] = msgspec.field(default_factory=lambda: DEFAULT_ASSIGNMENT)
    slice_axes: tuple[str, ...] = ()
    remat: str | tuple[str, ...] = "block"
    num_microbatches: int = 1
    state: str = "bf16-adam"

    def __post_init__(self) -> None:
        for role in self.assignment:
            if role not in ROLES:
                raise InputError(f"strategy.assignment has the unknown role {role!r}.{nearest(role, ROLES)}")
        if isinstance(self.remat, str) and self.remat not in REMAT_POLICIES:
            raise InputError(
                f"remat {self.remat!r} is not a policy.{nearest(self.remat, REMAT_POLICIES)} "
                f"A list of result names is also taken."
            )
        if self.state not in STATE_BYTES:
            raise InputError(f"state {self.state!r} is not known.{nearest(self.state, STATE_BYTES)}")
        if not 1 <= self.num_microbatches <= MAX_SEQUENCES:
            raise InputError(f"num_microbatches={self.num_microbatches} must be between 1 and {MAX_SEQUENCES}.")
        for axis, size in self.mesh.items():
            if size < 1:
                raise InputError(f"mesh axis {axis}={size} must be at least 1. Leave it out if it is not wanted.")

    @property
    def num_chips(self) -> int:
        """Devices of the mesh."""
        total = 1
        for size in self.mesh.values():
            total *= size
        return total

    @property
    def active_axes(self) -> tuple[str, ...]:
        """Axes of more than one device, major to minor."""
        return tuple(axis for axis, size in self.mesh.items() if size > 1)

    def rules(self, role: str) -> Rules:
        """The rules of a role; grad and optimizer follow weight unless they are given."""
        fallback = "weight" if role in ("grad", "optimizer") else role
        return self.assignment.get(role, self.assignment.get(fallback, {}))


def require_runnable_strategy(strategy: Strategy) -> None:
    """Raise CannotRunError for what is derived and counted but not executed in this version.

    Gradients are summed on the assumption that every device adds its own part of the loss once, which holds
    for the product's assignment and is not shown for others.
    """
    for axis in strategy.mesh:
        if axis not in MESH_AXES:
            raise CannotRunError(f"mesh axis {axis!r} is not one that runs.{nearest(axis, MESH_AXES)}")
    if strategy.assignment != DEFAULT_ASSIGNMENT:
        differing = next(
            role
            for role in (*strategy.assignment, *DEFAULT_ASSIGNMENT)
            if strategy.assignment.get(role) != DEFAULT_ASSIGNMENT.get(role)
        )
        raise CannotRunError(
            f"strategy.assignment.{differing} differs from the product's own; other assignments are derived and "
            f"counted but not executed in this version. Leave it out."
        )
    for axis in strategy.slice_axes:
        if axis not in strategy.mesh:
            raise CannotRunError(
                f"strategy.slice_axes names {axis!r}, which is no mesh axis.{nearest(axis, MESH_AXES)}"
            )


def make_mesh(axes: Mapping[str, int], *, known: Iterable[str] = MESH_AXES) -> dict[str, int]:
    """The product's mesh with every axis in its order, 1 where not given.

    Raises InputError for an axis that does not exist.
    """
    names = tuple(known)
    for axis in axes:
        if axis not in names:
            raise InputError(f"mesh axis {axis!r} is not known.{nearest(axis, names)}")
    return {axis: int(axes.get(axis, 1)) for axis in names}


def assign(rules: Rules, dims: tuple[str, ...], *, keep: Iterable[str] | None = None) -> tuple[Any, ...]:
    """Mesh axes of each dim of an array under ``rules``; only axes in ``keep`` when that is given."""
    kept = None if keep is None else set(keep)
    spent: set[str] = set()
    found: dict[str, tuple[str, ...]] = {}
    for dim, axes in rules.items():
        if dim not in dims:
            continue
        free = tuple(a for a in axes if a not in spent and (kept is None or a in kept))
        spent.update(free)
        found[dim] = free
    return tuple(found.get(dim, ()) for dim in dims)
