"""Assumptions of a prediction about the software that runs a step, and checks of what this version executes."""

from typing import Literal

import msgspec

from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import Checked
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, LAYOUTS, MAX_SEQUENCES, Strategy

Software = Literal["compiled", "captured", "captured-layers", "served", "eager", "eager-in-turn", "eager-2021"]
"""How the step runs: "compiled" as one program, "captured" from CUDA graphs, "served" by an inference engine, "eager"
kernel by kernel from a host that stays ahead. `TRAITS` has the properties of each."""

AttentionKernel = Literal["tuned", "portable", "narrow"]
"""Fused attention: "tuned", written for the chip; "portable", written once for all chips (Triton in 2023, needed for
ALiBi then); "narrow", written for the chip in the dtype of products if that has fewer than 16 bits."""

Scatters = Literal["turns", "once"]
"""How a ReduceScatter over a whole torus slice runs: "turns", as two collectives (programs of this package), or "once",
as one (other programs), which libtpu compiles as an AllReduce of the whole array."""

Dispatch = Literal["experts", "one_hot", "devices", "nodes"]
"""How tokens reach experts: "experts" sends a row for each expert; "one_hot" moves it to its slot by a product with
one-hot rows; "devices" sends one row to each device with experts of the token, and between nodes one row to each node,
which forwards it. "nodes" also sends rows to experts in 8 bits if products are in fp8; where forward and backward
passes overlap (DualPipe), it hides behind them and occupies `SENDING_SMS`. Source: DeepSeek-V3 (2024), section 3.2."""

EngineName = Literal["", "TensorRT-LLM", "vLLM", "SGLang"]
"""Name of an inference engine whose seconds between two steps are known; "" for none."""

SENDING_SMS = 20


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties in which kinds of software differ when they run a step; defaults are eager libraries'."""

    # One program on all devices. Compilers fuse both passes of a chunked loss head, size arrays of expert slots ahead,
    # sum gradients in float32, and add them to those of earlier microbatches in a pass of its own. Libraries send the
    # weights or gradients of a block in one flat buffer, and nothing hides their exchanges of tokens.
    is_compiled: bool = False
    starts_kernels: bool = True  # a host does, one by one, and one for each expert of a product
    captures_layers: bool = False  # CUDA graphs hold everything but the kernels of experts
    in_turn: bool = False  # communication and compute do not overlap
    fuses_attention: bool = True  # else several kernels, at the rate of other products, with scores in memory
    is_engine: bool = False  # an inference engine: kernels measured one by one, graphs for steps without prompts


TRAITS: dict[Software, Traits] = {
    "compiled": Traits(is_compiled=True, starts_kernels=False),
    "captured": Traits(starts_kernels=False),
    "captured-layers": Traits(captures_layers=True),
    "served": Traits(is_engine=True, starts_kernels=False, in_turn=True),
    "eager": Traits(),
    "eager-in-turn": Traits(in_turn=True),
    "eager-2021": Traits(in_turn=True, fuses_attention=False),
}


class Assumptions(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assumptions of a prediction besides the strategy; runs do not use them.

    ``software`` runs the step, and ``attention_kernel`` its attention. ``imbalance`` is the load of the busiest expert
    device over the mean if no bound on slots applies. With ``empty_slots`` compiled software without such a bound has
    slots for more rows than the mean on expert devices, since its arrays have fixed sizes. ``dispatch`` is how tokens
    reach experts; with ``exchange_overlap`` this hides behind another microbatch. With ``narrow_gathers`` weights are
    gathered in fp8 where products are in fp8. ``engine`` is the engine of the software "served", which needs seconds
    between steps. ``scatters`` is how a ReduceScatter runs over a whole torus slice.
    """

    software: Software = "compiled"
    attention_kernel: AttentionKernel = "tuned"
    imbalance: float = 1.0
    empty_slots: bool = True
    dispatch: Dispatch = "experts"
    exchange_overlap: bool = False
    narrow_gathers: bool = False
    engine: EngineName = ""
    scatters: Scatters = "turns"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.imbalance <= MAX_SEQUENCES:
            raise InputError(f"assumptions.imbalance={self.imbalance} must be at least 1.")

    @property
    def of_other_software(self) -> dict[str, str | bool]:
        """The fields, with values, that differ from what programs of this package do: they are priced, not executed."""
        field_names = ("attention_kernel", "software", "dispatch", "exchange_overlap", "narrow_gathers", "scatters")
        return {name: getattr(self, name) for name in field_names if getattr(self, name) != getattr(AS_RUN, name)}

    @property
    def traits(self) -> Traits:
        """The properties of the software."""
        return TRAITS[self.software]

    @property
    def holds_empty_slots(self) -> bool:
        """True if empty expert slots take memory and are sent; False for libraries, which size arrays by the load."""
        return self.empty_slots and self.traits.is_compiled


AS_RUN = Assumptions()
"""Assumptions that hold for programs of this package."""


def require_runnable_strategy(strategy: Strategy, *, trains: bool = True) -> None:
    """Raises CannotRunError for strategies that are derived and priced but not executed in this version.

    Gradients are summed on the assumption that every device adds its own part of the loss once, which holds
    for the standard assignments and is not shown for others.
    """
    for axis in strategy.mesh:
        if axis not in MESH_AXES:
            raise CannotRunError(f"{axis!r} is not a mesh axis.{nearest(axis, MESH_AXES)}")
    if strategy.num_islands > 1:
        raise CannotRunError(
            f"strategy.islands={strategy.num_islands}: one program runs one island. Train with "
            f"launch --elastic -n {strategy.num_islands}, which starts a runtime for each island."
        )
    if strategy.precision not in ("", strategy.state_dtype):
        _refuse("precision", strategy.precision, f"{strategy.state_dtype!r}, the state's own")
    if strategy.zero is None and (trains or strategy.assignment not in LAYOUTS.values()):
        differing_role = next(
            role
            for role in (*strategy.assignment, *DEFAULT_ASSIGNMENT)
            if strategy.assignment.get(role) != DEFAULT_ASSIGNMENT.get(role)
        )
        raise CannotRunError(
            f"strategy.assignment.{differing_role} differs from the standard one; other assignments are derived and "
            f"counted but not executed in this version. Leave it out."
        )


def require_runnable_assumptions(assumptions: Assumptions) -> None:
    """Raises CannotRunError for assumptions about other software, which is only priced."""
    for name, value in assumptions.of_other_software.items():
        _refuse(name, value, getattr(AS_RUN, name))


def _refuse(name: str, value: str | bool, instead: str | bool) -> None:
    raise CannotRunError(f"{name} {value!r} is planned but not executed in this version. Use {instead}.")
