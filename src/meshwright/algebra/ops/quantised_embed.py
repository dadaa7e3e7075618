"""Look-up of rows in an int8 table, each times its scale."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.embed import forward, row_bytes

OP = OpKind(forward=forward, steps={"quantised_embed": StepKind(hbm_bytes=row_bytes, group="embedding")})
