"""Attention of new positions on a cache of latents."""

from typing import Any

from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.attention.pages import PagedPart
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context
from meshwright.nn.ops.cached_attention import attention_of, ragged_call


def cached_latent_attention(
    context: Context,
    step: Step,
    ql: Array,
    q: Array,
    latent: LayerCache,
    shared: LayerCache,
    *given: Any,
) -> Array | tuple[Array, ...]:
    """Returns weighted latents; scores are absorbed queries ``ql`` x latents + rotated parts of ``q`` x shared keys."""
    call, inputs = ragged_call(context, step, latent, q, given)
    # one head: all heads of queries share the latents
    caches = (latent, shared, *(x for x in inputs if isinstance(x, LayerCache)))
    latents, shared_keys, *scales = (cache.pages[:, :, None] for cache in caches)
    latent_scale, shared_scale = scales or (None, None)
    parts = [
        PagedPart(queries=ql, keys=latents, scale=latent_scale),
        PagedPart(queries=q[..., context.model.qk_nope_head_dim :], keys=shared_keys, scale=shared_scale),
    ]
    return attention_of(call, parts, latents, latent_scale)


STEPS = {"cached_latent_attention": cached_latent_attention}
