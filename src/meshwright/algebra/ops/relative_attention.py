"""Attention whose scores have a bias of each head for each bucket of distances (T5); the bias is the model's only
information on positions.

Rules are those of attention; the table of biases is split as the heads are, like sinks. The scores are written to
memory, because the bias and its gradient need them. Keys never go round a ring.
"""

from functools import partial

import msgspec

from meshwright.algebra.kinds import CountRule, OpKind, StepKind
from meshwright.algebra.ops import attention
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


class RelativeAttention(Attention, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details besides attention's: all distances from ``distance`` on share the last bucket."""

    distance: int = 128

    @property
    def can_ring(self) -> bool:
        """Always False: every block of keys would need its own part of the bias."""
        return False


def _with_scores(count: CountRule) -> CountRule:
    """Returns a count of attention with scores written to memory."""

    def counted(step: Step, sizes: OpSizes) -> Number:
        scores = "in_memory" if sizes.scores == "on_chip" else sizes.scores
        return count(step, msgspec.structs.replace(sizes, scores=scores, causal=False))

    return counted


COUNTS = StepKind(
    flops=_with_scores(attention.flops),
    hbm_bytes=_with_scores(attention.hbm_bytes),
    group="attention",
    scratch_bytes=_with_scores(attention.scratch_bytes),
)
OP = OpKind(
    forward=partial(attention.forward, form=RelativeAttention),
    backward=partial(attention.backward, form=RelativeAttention),
    steps={"relative_attention": COUNTS, "relative_attention_backward": COUNTS},
)
