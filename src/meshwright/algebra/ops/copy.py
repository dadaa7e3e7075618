"""An array under another name: nothing is computed or moved. Rules make it; no program names it."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing

OP = OpKind(steps={"copy": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0, reads_sum=False)})
