"""Products computed block by block while a permute sends blocks: only `rewrites.collective_matmul` makes this step."""

from typing import Literal

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind, nothing
from meshwright.algebra.notation import product
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step

NAME = "collective_matmul"

CollectiveForm = Literal["all_gather", "reduce_scatter", "all_reduce"]


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """Details: the collective that the products replace, its mesh axes, and the number of directions of the ring."""

    form: CollectiveForm
    axes: tuple[str, ...]
    ways: int


def num_blocks(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of blocks in which each part is computed: 1 of this device, ``ways`` of each other device."""
    if not step.parts:
        return 1
    return 1 + (product(sizes.mesh[axis] for axis in step.details.axes) - 1) * step.details.ways


OP = OpKind(steps={NAME: StepKind(flops=nothing, hbm_bytes=nothing, group="contraction")})
"""FLOPs and bytes are counted for the parts."""
