"""Attention of new positions on a cache of latents."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import cache
from meshwright.nn.cache import LayerCache, Meeting
from meshwright.nn.context import Context
from meshwright.nn.ops.cached_attention import cache_facts


def cached_latent_attention(
    context: Context,
    step: Step,
    ql: jax.Array,
    q: jax.Array,
    latent: LayerCache,
    shared: LayerCache,
    positions: jax.Array,
    *others: LayerCache,
) -> jax.Array:
    """Queries as the latent meets them, and their rotated parts, against one head of latents and rotated key parts."""
    facts = cache_facts(context, step, positions, latent)
    one_head = latent.read()[:, :, None]
    latent_scale, shared_scale = (other.read()[:, :, None] for other in others) if others else (None, None)
    meetings = [
        Meeting(queries=ql, keys=one_head, scale=latent_scale),
        Meeting(queries=q[..., context.model.qk_nope_head_dim :], keys=shared.read()[:, :, None], scale=shared_scale),
    ]
    return cache.cached_attention(meetings, one_head, value_scale=latent_scale, **facts)


STEPS = {"cached_latent_attention": cached_latent_attention}
