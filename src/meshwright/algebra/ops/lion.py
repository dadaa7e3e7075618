"""Lion: one moment of each weight, the running mean of its gradient; the sign of a mix of both is the change."""

from meshwright.algebra.ops.adamw import elementwise_optimizer

OP = elementwise_optimizer("lion", "mu")
