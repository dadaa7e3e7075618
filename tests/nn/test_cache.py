"""Attention on the pages of a layer, by the ops that read them."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.attention import Attention
from meshwright.nn.cache import LayerCache
from meshwright.nn.ops.cached_attention import cached_attention
from meshwright.nn.ops.cached_latent_attention import cached_latent_attention
from tests.nn.arrays import close
from tests.tier import sampled

BATCH, LAYERS = 3, 2


@pytest.mark.parametrize("latent", sampled([False, True], True))
def test_drafts_are_attended_as_if_they_came_one_by_one(latent):
    """Up to three new positions of each sequence; pages of a layer that is not the first."""
    rng = np.random.default_rng(0)
    context = SimpleNamespace(model=SimpleNamespace(attention_scale=0.3, qk_nope_head_dim=0), longest=3)
    arrays = tuple(map(parse_array, ("q[B,T,N,H]", "k[Pg,Pl,K,H]")))
    step = SimpleNamespace(details=Attention(window=9), more=(), inputs=arrays)
    heads = () if latent else (2,)
    widths = (6, 3) if latent else (6, 5)
    caches = [
        LayerCache(jnp.asarray(rng.normal(size=(LAYERS, 12, 4, *heads, n)), jnp.float32), jnp.int32(1)) for n in widths
    ]
    pages = jnp.asarray(rng.permutation(12).reshape(BATCH, 4), jnp.int32)
    positions = np.array([[6, 7, 8], [0, -1, -1], [13, 14, -1]], np.int32)
    queries = [jnp.asarray(rng.normal(size=(9, 1, 4, n)), jnp.float32) for n in (widths if latent else widths[:1])]
    attend = cached_latent_attention if latent else cached_attention

    def attended(first, own):
        """The rows from ``first`` on that have ``own`` positions of each sequence, [9, 1, 4, Hv]."""
        given = first, (own >= 0).sum(axis=1), own.max(axis=1) + 1
        return np.asarray(attend(context, step, *queries, *caches, *(jnp.asarray(x, jnp.int32) for x in given), pages))

    firsts = np.arange(0, 9, 3)
    together = attended(firsts, positions).reshape(3, 3, 4, -1)
    for t in range(3):
        one = attended(firsts + t, positions[:, t : t + 1])[firsts + t, 0]
        close(together[:, t], one)
        np.testing.assert_array_equal(one[positions[:, t] < 0], 0)
        assert np.abs(one[positions[:, t] >= 0]).min() > 0
