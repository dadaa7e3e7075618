"""Attention of new positions on a cache of latents and of rotated key parts that all heads share."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import product
from meshwright.algebra.ops.cached_attention import forward, hbm_bytes, slots_met
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T N S (Rkv + Hr + Rkv): scores of both parts, and the weighted sum of latents."""
    queries, _, latents, shared = step.inputs[:4]
    num_rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    return 2.0 * num_rows * slots_met(step, sizes) * (2 * sizes.dims[latents.dims[-1]] + sizes.dims[shared.dims[-1]])


OP = OpKind(
    forward=forward,
    steps={"cached_latent_attention": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention")},
)
