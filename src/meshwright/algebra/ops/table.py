"""The op kinds: for each, its sharding rule forward and backward, as steps added to a trace.

The rules are in the modules of their theme. The matching JAX functions are in `nn.ops.table`, one per kind that runs;
the FLOPs and bytes of the local steps are in `cost.work.ops`.
"""

from collections.abc import Callable

from meshwright.algebra.ops.attention import attention_backward, attention_forward
from meshwright.algebra.ops.experts import (
    combine_backward,
    combine_forward,
    dispatch_backward,
    dispatch_forward,
    route_backward,
    route_forward,
)
from meshwright.algebra.ops.generation import GENERATION_KINDS
from meshwright.algebra.ops.local import (
    einsum_backward,
    einsum_forward,
    elementwise_backward,
    elementwise_forward,
    embed_backward,
    embed_forward,
    linear_backward,
    norm_backward,
    norm_forward,
    rope_backward,
    rope_forward,
)
from meshwright.algebra.ops.loss_head import head_backward, head_forward
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace

Rule = Callable[[Op, Trace], None]

KINDS: dict[str, tuple[Rule, Rule]] = {
    "einsum": (einsum_forward, einsum_backward),
    "rms_norm": (norm_forward, norm_backward),
    "layer_norm": (norm_forward, norm_backward),
    "rope": (rope_forward, rope_backward),
    "attention": (attention_forward, attention_backward),
    "add": (elementwise_forward, linear_backward),
    "bias_add": (elementwise_forward, linear_backward),
    "join_heads": (elementwise_forward, linear_backward),
    "silu_mul": (elementwise_forward, elementwise_backward),
    "gelu_mul": (elementwise_forward, elementwise_backward),
    "gelu": (elementwise_forward, elementwise_backward),
    "token_gate": (elementwise_forward, elementwise_backward),
    "route": (route_forward, route_backward),
    "dispatch": (dispatch_forward, dispatch_backward),
    "combine": (combine_forward, combine_backward),
    "embed": (embed_forward, embed_backward),
    "linear_cross_entropy": (head_forward, head_backward),
    **GENERATION_KINDS,
}
"""Op kind -> (forward rule, backward rule)."""
