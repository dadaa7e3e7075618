"""The choice of a kernel, and the fused kernels as far as a machine without them can tell."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.attention import splash as attention_splash
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.platform import Case, attention_way
from meshwright.nn.attention.visibility import Rule

CASE = {"dtype": "bfloat16", "num_queries": 4096, "num_keys": 4096, "width": 128, "value_width": 128, "order": "rows"}


@pytest.mark.parametrize(
    ("platform", "changes", "way"),
    [
        ("cuda", {}, "cudnn"),
        ("cuda", {"dtype": "float16", "width": 64, "value_width": 64, "window": True}, "cudnn"),
        ("cuda", {"order": "all", "num_keys": 512}, "cudnn"),
        ("cuda", {"order": "places"}, "blocks"),
        ("cuda", {"dtype": "float32"}, "blocks"),
        ("cuda", {"softcap": True}, "blocks"),
        ("cuda", {"sinks": True}, "blocks"),
        ("cuda", {"documents": True}, "blocks"),
        ("cuda", {"width": 192}, "blocks"),
        ("cuda", {"width": 256, "value_width": 256}, "blocks"),
        ("cuda", {"dtype": "float32", "num_queries": 512}, "staircase"),
        ("rocm", {}, "blocks"),
        ("tpu", {}, "splash"),
        ("tpu", {"softcap": True, "sinks": True, "documents": True, "window": True, "dtype": "float32"}, "splash"),
        ("tpu", {"num_queries": 4000}, "blocks"),
        ("tpu", {"order": "places"}, "blocks"),
        ("cpu", {}, "blocks"),
        ("cpu", {"num_queries": 2048}, "staircase"),
        ("cpu", {"num_queries": 2048, "order": "all"}, "blocks"),
    ],
)
def test_the_way_of_each_case(platform, changes, way):
    assert attention_way(platform, Case(**{**CASE, **changes})) == way


def inputs(B, T, N, K, H, dtype):
    rng = np.random.default_rng(0)
    shapes = {"dout": (B, T, N, H), "q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H)}
    arrays = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    return arrays, {"positions": positions, "key_positions": positions}


@pytest.mark.parametrize("window", [None, 40])
def test_cudnn_runs_one_kernel_each_way(monkeypatch, window):
    """Lowered for CUDA: one forward kernel, and backward its own kernel without a second forward one."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    arrays, places = inputs(2, 128, 4, 2, 64, jnp.bfloat16)
    facts = {**places, "scale": 0.125, "window": window, "in_order": True, "platform": "cuda"}
    qkv = [arrays[n] for n in "qkv"]

    def kernels(function, *given):
        text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"__cudnn\$\w+", text)

    assert kernels(lambda *qkv: attention(*qkv, **facts), *qkv) == ["__cudnn$fmhaSoftmax"]
    o, lse = jax.eval_shape(lambda *qkv: attention(*qkv, **facts), *qkv)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 128, 4, 64), jnp.bfloat16, (2, 128, 4), jnp.float32)
    held = (arrays["dout"], o, lse, *qkv)
    assert kernels(lambda *held: attention_backward(*held, **facts), *held) == ["__cudnn$fmhaSoftmaxBackward"]


@pytest.mark.parametrize(
    ("rule", "documents", "sinks"),
    [
        pytest.param(Rule(scale=0.2), False, False, marks=pytest.mark.slow),
        (Rule(scale=0.2, window=50, softcap=3.0), True, True),
    ],
    ids=["causal", "all"],
)
def test_splash_gives_what_the_own_form_gives(monkeypatch, rule, documents, sinks):
    """The kernel is interpreted, which shows that it is told the right things; it says nothing of a TPU."""
    import meshwright.nn.attention.choice as module

    for name in ("splash_forward", "splash_backward"):
        interpreted = functools.partial(getattr(attention_splash, name), interpret=True)
        monkeypatch.setattr(module, name, interpreted)
    arrays, places = inputs(1, 256, 2, 1, 128, jnp.float32)
    if documents:
        places |= dict.fromkeys(("documents", "key_documents"), (places["positions"] >= 100).astype(jnp.int32))
    sink = jnp.array([0.5, -1.0]) if sinks else None
    facts = {**places, "scale": rule.scale, "window": rule.window, "softcap": rule.softcap, "sinks": sink}

    @functools.partial(jax.jit, static_argnums=0)
    def both(platform, dout, *qkv):
        o, lse = attention(*qkv, **facts, in_order=True, platform=platform)
        return o, lse, *attention_backward(dout, o, lse, *qkv, **facts, in_order=True, platform=platform)

    given = [arrays[n] for n in ("dout", "q", "k", "v")]
    for found, expected in zip(both("tpu", *given), both("cpu", *given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


def test_private_parts_of_jax_are_where_they_are_looked_for():
    """Both fused kernels' backward rules are reached by private names, which a new version of JAX may move."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    assert callable(cudnn._dot_product_attention_bwd_rule)
    assert callable(splash._splash_attention_bwd)
