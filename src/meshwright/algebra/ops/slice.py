"""The part of an array that a device keeps: no data moves. `reshard` makes the step; programs do not have the op."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing

OP = OpKind(steps={"slice": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0)})
