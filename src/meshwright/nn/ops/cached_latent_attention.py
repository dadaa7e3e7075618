"""Attention of new positions on a cache of latents."""

from typing import Any

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, OwnAttention, ScorePart
from meshwright.nn.context import Context
from meshwright.nn.ops.cached_attention import cache_facts, packed_attention, packed_call, results_of


def cached_latent_attention(
    context: Context,
    step: Step,
    ql: Array,
    q: Array,
    latent: LayerCache,
    shared: LayerCache,
    *given: Any,
) -> Array | OwnAttention:
    """Returns weighted latents; scores are absorbed queries ``ql`` x latents + rotated parts of ``q`` x shared keys."""
    call, others = packed_call(context, step, latent, q, given)
    # one head: all heads of queries share the latents
    caches = (latent, shared, *(x for x in others if isinstance(x, LayerCache)))
    latents, keys, *scales = (each.entries(paged=step.details.packed)[:, :, None] for each in caches)
    latent_scale, shared_scale = scales or (None, None)
    parts = [
        ScorePart(queries=ql, keys=latents, scale=latent_scale),
        ScorePart(queries=q[..., context.model.qk_nope_head_dim :], keys=keys, scale=shared_scale),
    ]
    if call is not None:
        return packed_attention(call, parts, latents, latent_scale)
    facts = cache_facts(context, step, given[0], latent, others)
    return results_of(step, cache.cached_attention(parts, latents, value_scale=latent_scale, **facts))


STEPS = {"cached_latent_attention": cached_latent_attention}
