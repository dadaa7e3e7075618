"""Attention of new positions on a cache of latents."""

from typing import Any

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, OwnAttention, ScorePart
from meshwright.nn.context import Context
from meshwright.nn.ops.cached_attention import cache_facts, results_of, table_of


def cached_latent_attention(
    context: Context,
    step: Step,
    ql: Array,
    q: Array,
    latent: LayerCache,
    shared: LayerCache,
    positions: Array,
    *others: Any,
) -> Array | OwnAttention:
    """Returns weighted latents; scores are absorbed queries ``ql`` x latents + rotated parts of ``q`` x shared keys."""
    pages, others = table_of(step, others)
    facts = cache_facts(context, step, positions, latent, pages)
    one_head = latent.read(pages)[:, :, None]
    latent_scale, shared_scale = (other.read(pages)[:, :, None] for other in others) if others else (None, None)
    parts = [
        ScorePart(queries=ql, keys=one_head, scale=latent_scale),
        ScorePart(
            queries=q[..., context.model.qk_nope_head_dim :], keys=shared.read(pages)[:, :, None], scale=shared_scale
        ),
    ]
    return results_of(step, cache.cached_attention(parts, one_head, value_scale=latent_scale, **facts))


STEPS = {"cached_latent_attention": cached_latent_attention}
