"""The choice of a kernel, and the fused kernels as far as a machine without them can tell."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.attention import splash as attention_splash
from meshwright.nn.attention.choice import attention, attention_backward, kernel_of
from meshwright.nn.attention.platform import traced_for
from meshwright.nn.attention.visibility import AttentionCall, TokenPositions
from tests.nn.arrays import close

CASE = {"dtype": "bfloat16", "T": 4096, "S": 4096, "H": 128, "Hv": 128}


@pytest.mark.parametrize(
    ("platform", "changes", "way"),
    [
        ("cuda", {}, "cudnn"),
        ("cuda", {"dtype": "float16", "H": 64, "Hv": 64, "window": 40}, "cudnn"),
        ("cuda", {"order": "all", "S": 512}, "cudnn"),
        ("cuda", {"order": "positions"}, "blocks"),
        ("cuda", {"dtype": "float32"}, "blocks"),
        ("cuda", {"softcap": 2.0}, "blocks"),
        ("cuda", {"sinks": True}, "blocks"),
        ("cuda", {"documents": True}, "blocks"),
        ("cuda", {"H": 192}, "blocks"),
        ("cuda", {"H": 256, "Hv": 256}, "blocks"),
        ("cuda", {"dtype": "float32", "T": 512}, "staircase"),
        ("rocm", {}, "blocks"),
        ("tpu", {}, "splash"),
        ("tpu", {"softcap": 2.0, "sinks": True, "documents": True, "window": 40, "dtype": "float32"}, "splash"),
        ("tpu", {"T": 4000}, "blocks"),
        ("tpu", {"order": "positions"}, "blocks"),
        ("cpu", {}, "blocks"),
        ("cpu", {"T": 2048}, "staircase"),
        ("cpu", {"T": 2048, "order": "all"}, "blocks"),
    ],
)
def test_the_way_of_each_case(platform, changes, way):
    sizes = {name: {**CASE, **changes}[name] for name in CASE}
    rule = {name: value for name, value in changes.items() if name in ("window", "softcap")}
    rows = jnp.zeros((1, 1)) if changes.get("documents") else None
    sinks = jnp.zeros(2) if changes.get("sinks") else None
    order = changes.get("order", "rows")
    call = AttentionCall(
        scale=1.0, **rule, query=TokenPositions(rows, rows), sinks=sinks, mask=order, platform=platform
    )
    shapes = ((1, sizes["T"], 2, sizes["H"]), (1, sizes["S"], 2, sizes["H"]), (1, sizes["S"], 2, sizes["Hv"]))
    qkv = [jax.ShapeDtypeStruct(shape, sizes["dtype"]) for shape in shapes]
    assert kernel_of(call, *qkv).__name__ == f"meshwright.nn.attention.{way}"


@pytest.mark.parametrize(
    ("capability", "widths", "way"),
    [
        ("9.0", (192, 128), "cudnn"),
        ("10.0", (192, 128), "cudnn"),
        ("8.0", (192, 128), "staircase"),
        ("9.0", (128, 192), "staircase"),
    ],
)
def test_latent_attention_is_fused_from_hopper_on(capability, widths, way):
    """One kernel each way for DeepSeek's heads of 192, with values of 128, though the GPU is absent."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    _, places = inputs(1, 256, 2, 2, 8, jnp.bfloat16)
    call = AttentionCall(scale=0.1, query=places, key=places, mask="rows", platform="cuda")
    q, k, v, dout, o = (
        jax.ShapeDtypeStruct((1, 256, 2, width), jnp.bfloat16)
        for width in (widths[0], widths[0], widths[1], widths[1], widths[1])
    )
    lse = jax.ShapeDtypeStruct((1, 256, 2), jnp.float32)

    def kernels(function, *given):
        text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"__cudnn\$\w+", text)

    with traced_for("cuda", SimpleNamespace(compute_capability=capability)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
        assert kernel_of(call, q, k, v).__name__ == f"meshwright.nn.attention.{way}"
        if way == "cudnn":
            assert kernels(lambda *qkv: attention(call, *qkv), q, k, v) == ["__cudnn$fmhaSoftmax"]
            backward = kernels(lambda *given: attention_backward(call, given[:3], *given[3:]), dout, o, lse, q, k, v)
            assert backward == ["__cudnn$fmhaSoftmaxBackward"]


def inputs(B, T, N, K, H, dtype):
    rng = np.random.default_rng(0)
    shapes = {"dout": (B, T, N, H), "q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, H)}
    arrays = {n: jnp.asarray(rng.normal(size=s), dtype) for n, s in shapes.items()}
    return arrays, TokenPositions(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T)))


@pytest.mark.parametrize("window", [None, 40])
def test_cudnn_runs_one_kernel_each_way(monkeypatch, window):
    """Lowered for CUDA: one forward kernel, and backward its own kernel without a second forward one."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    arrays, places = inputs(2, 128, 4, 2, 64, jnp.bfloat16)
    call = AttentionCall(scale=0.125, window=window, query=places, key=places, mask="rows", platform="cuda")
    qkv = [arrays[n] for n in "qkv"]

    def kernels(function, *given):
        text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"__cudnn\$\w+", text)

    assert kernels(lambda *qkv: attention(call, *qkv), *qkv) == ["__cudnn$fmhaSoftmax"]
    o, lse = jax.eval_shape(lambda *qkv: attention(call, *qkv), *qkv)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 128, 4, 64), jnp.bfloat16, (2, 128, 4), jnp.float32)
    given = (arrays["dout"], o, lse)
    assert kernels(lambda *given: attention_backward(call, given[:3], *given[3:]), *given, *qkv) == [
        "__cudnn$fmhaSoftmaxBackward"
    ]


@pytest.mark.parametrize(
    ("rule", "documents", "sinks"),
    [
        pytest.param({}, False, None, marks=pytest.mark.slow),
        ({"window": 50, "softcap": 3.0}, True, (0.5, -1.0)),
    ],
    ids=["causal", "all"],
)
def test_splash_gives_what_the_own_form_gives(monkeypatch, rule, documents, sinks):
    """The kernel is interpreted, which shows that it is told the right things; it says nothing of a TPU."""
    for name in ("forward", "backward"):
        interpreted = functools.partial(getattr(attention_splash, name), interpret=True)
        monkeypatch.setattr(attention_splash, name, interpreted)
    arrays, places = inputs(1, 256, 2, 1, 128, jnp.float32)
    if documents:
        places = places._replace(document=(places.position >= 100).astype(jnp.int32))
    facts = {"scale": 0.2, **rule, "sinks": None if sinks is None else jnp.array(sinks)}

    @functools.partial(jax.jit, static_argnums=0)
    def both(platform, dout, *qkv):
        call = AttentionCall(**facts, query=places, key=places, mask="rows", platform=platform)
        o, lse = attention(call, *qkv)
        return o, lse, *attention_backward(call, (dout, o, lse), *qkv)

    given = [arrays[n] for n in ("dout", "q", "k", "v")]
    for found, expected in zip(both("tpu", *given), both("cpu", *given), strict=True):
        close(found, expected)


def test_private_parts_of_jax_are_where_they_are_looked_for():
    """Both fused kernels' backward rules are reached by private names, which a new version of JAX may move."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    assert callable(cudnn._dot_product_attention_bwd_rule)
    assert callable(splash._splash_attention_bwd)
