"""The part of an array that a device keeps: nothing is moved. `reshard` makes the step; no program names it."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing

OP = OpKind(steps={"slice": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0)})
