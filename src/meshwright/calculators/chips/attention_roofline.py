"""Rooflines of a layer's attention products and of its feed-forward block, and the ratio of their times.

Times of one layer on one chip that holds it whole, projections left out, keys and values in bf16.
Source: How to Scale Your Model, exercise 4.4.
"""

import msgspec

from meshwright.core.errors import InputError
from meshwright.cost.formulas.accounting import attention_work
from meshwright.cost.formulas.roofline import Operand, Roofline, Work, chip_roofline, einsum_work
from meshwright.spec.chip import Chip
from meshwright.spec.model import Model


class AttentionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One layer at a context length: attention's roofline, and seconds of the feed-forward block."""

    keys: int
    queries: int
    batch_seqs: int
    attention: Roofline
    ffw_s: float

    @property
    def ratio(self) -> float:
        """Seconds of attention over those of the feed-forward block."""
        return float(self.attention.lower_s / self.ffw_s)


def compute_bound_len(model: Model, critical_intensity: float) -> float:
    """Returns the length from which attention in prefill is compute-bound: T G / (G + 1) > the critical intensity."""
    group = model.num_heads / model.num_kv_heads
    return critical_intensity * (group + 1) / group


def block_times(model: Model, chip: Chip, *, keys: int, queries: int, batch_seqs: int, dtype: str) -> AttentionTimes:
    """Returns both blocks of one layer for ``batch_seqs`` sequences of ``queries`` new tokens; each overlaps perfectly.

    Prefill has as many queries as keys, generation one. No causal discount, no window.
    """
    if model.latent_attention:
        raise InputError(f"{model.name} keeps latents instead of keys: name a model with plain or grouped heads.")
    work = attention_work(
        queries=queries,
        keys=keys,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        batch_seqs=batch_seqs,
    )
    return AttentionTimes(
        keys=keys,
        queries=queries,
        batch_seqs=batch_seqs,
        attention=chip_roofline(work, chip, dtype=dtype),
        ffw_s=sum(float(line.lower_s) for line in _ffw(model, chip, tokens=queries * batch_seqs, dtype=dtype)),
    )


def _ffw(model: Model, chip: Chip, *, tokens: int, dtype: str) -> list[Roofline]:
    """Returns the products of the feed-forward block: two or three matrices, of all experts that tokens reach."""
    matrices = 3 if model.gated else 2
    if not model.num_experts:
        return [_product(chip, tokens, model.d_model, model.d_ff, dtype)] * matrices
    met = min(model.num_experts, tokens * model.experts_per_token)
    each = tokens * model.experts_per_token / met
    routed = _product(chip, each, model.d_model, model.d_ff_expert, dtype, copies=met)
    shared = [_product(chip, tokens, model.d_model, model.d_ff_shared, dtype)] if model.d_ff_shared else []
    return [routed, *shared] * matrices


def _product(chip: Chip, tokens: float, width: int, hidden: int, dtype: str, *, copies: int = 1) -> Roofline:
    sizes = {"B": tokens, "D": width, "F": hidden}
    x, w, h = (Operand(dims, "bf16") for dims in (("B", "D"), ("D", "F"), ("B", "F")))
    one = einsum_work((x, w), h, sizes)
    work = Work(flops=copies * one.flops, num_bytes=copies * one.num_bytes)
    return chip_roofline(work, chip, dtype=dtype)
