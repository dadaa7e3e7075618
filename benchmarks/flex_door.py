"""The front door of attention on a GPU: `flex_attention` beside dense attention in float32, and which kernel ran.

PYTHONPATH=src python benchmarks/flex_door.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.masks import mods
from meshwright.nn.attention.flex import flex_attention

BATCH, LENGTH, HEADS, KV_HEADS = 2, 700, 4, 2


def dense(score: Any, mask: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention in float32 with all scores."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    at = [
        jnp.arange(n).reshape([-1 if d == dim else 1 for d in range(4)])
        for dim, n in enumerate((BATCH, HEADS, LENGTH, LENGTH))
    ]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores, *at)
    weights = jax.nn.softmax(jnp.where(mask(*at), scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


def main() -> None:
    """Prints the largest errors of results and gradients, relative to the largest value."""
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (BATCH, LENGTH)), axis=1))
    slopes = jnp.asarray(mods.alibi_slopes(HEADS))
    spans = jnp.asarray((np.arange(LENGTH) // 100 % 2) * (np.arange(LENGTH) // 100))[None].repeat(BATCH, 0)
    cases: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any]]] = {
        "documents": (None, mods.and_masks(mods.causal(), mods.document(ids))),
        "transfusion, soft cap": (mods.softcap(20.0), mods.transfusion(spans)),
        "canvas": (None, mods.neighbourhood_2d(35, 20, 7)),
        "alibi": (mods.alibi(slopes), mods.causal()),
    }
    for width in (64, 128):
        shapes = ((HEADS, "q"), (KV_HEADS, "k"), (KV_HEADS, "v"), (HEADS, "dout"))
        given = {n: jnp.asarray(rng.normal(size=(BATCH, LENGTH, h, width)), jnp.bfloat16) for h, n in shapes}
        qkv = [given[n] for n in "qkv"]
        for name, (score, mask) in cases.items():

            def ours(*qkv: Any, score: Any = score, mask: Any = mask, dout: Any = given["dout"]) -> Any:
                o, pull = jax.vjp(lambda q, k, v: flex_attention(q, k, v, score, mask), *qkv)
                return o, *pull(dout)

            step = jax.jit(ours)
            text = step.lower(*qkv).as_text()
            kernel = "mosaic" if "mosaic_gpu" in text else "cudnn" if "cudnn" in text else "xla"
            wide = [x.astype(jnp.float32) for x in qkv]
            o, pull = jax.vjp(lambda *x, score=score, mask=mask: dense(score, mask, *x), *wide)
            wanted = o, *pull(given["dout"].astype(jnp.float32))
            errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(step(*qkv), wanted, strict=True)]
            print(f"{name}, width {width}, {kernel}: " + " ".join(f"{x:.1e}" for x in errors), flush=True)


if __name__ == "__main__":
    main()
