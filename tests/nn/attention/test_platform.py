"""The choice of a kernel, and the fused kernels as far as a machine without them can tell."""

import re
from functools import partialmethod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.attention import choice
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward, kernel_of
from meshwright.nn.attention.kernels import pallas_tpu
from meshwright.nn.attention.platform import traced_for
from tests.nn.attention import rules

CASE = {"dtype": "bfloat16", "T": 4096, "S": 4096, "H": 128, "Hv": 128}


def call_of(platform, length, *, mask="causal", score=None, **facts):
    made = None if mask is None else rules.mask_of(mask, length)
    own = score and (rules.distance_bias(2) if score == "distance" else rules.score_of(score, length))
    return AttentionCall(scale=1.0, mask=made, score=own, platform=platform, **facts)


@pytest.mark.parametrize(
    ("platform", "changes", "way"),
    [
        ("cuda", {}, "cudnn"),
        ("cuda", {"dtype": "float16", "H": 64, "Hv": 64, "mask": "sliding_window(40)"}, "cudnn"),
        ("cuda", {"mask": None, "S": 512}, "cudnn"),
        ("cuda", {"q_idx": np.arange(4096)[::-1]}, "xla"),
        ("cuda", {"dtype": "float32"}, "xla"),
        ("cuda", {"score": "softcap(2)"}, "xla"),
        ("cuda", {"mask": "causal & document"}, "xla"),
        ("cuda", {"H": 192}, "xla"),
        ("cuda", {"H": 256, "Hv": 256}, "xla"),
        ("rocm", {}, "xla"),
        ("tpu", {}, "pallas"),
        ("tpu", {"score": "softcap(2)", "mask": "sliding_window(40) & document", "dtype": "float32"}, "pallas"),
        ("tpu", {"T": 4000, "S": 4000}, "pallas"),
        ("tpu", {"q_idx": np.arange(4096)[::-1], "H": 192}, "pallas"),
        ("tpu", {"score": "distance"}, "xla"),
        ("tpu", {"score": "alibi", "learns": True}, "xla"),
        ("tpu", {"T": 64, "S": 64}, "xla"),
        ("cpu", {}, "xla"),
    ],
)
def test_the_kernel_of_each_case(platform, changes, way):
    sizes = {name: {**CASE, **changes}[name] for name in CASE}
    others = {name: value for name, value in changes.items() if name not in CASE}
    call = call_of(platform, max(sizes["T"], sizes["S"]), **others)
    shapes = ((2, sizes["T"], 4, sizes["H"]), (2, sizes["S"], 4, sizes["H"]), (2, sizes["S"], 4, sizes["Hv"]))
    qkv = [jax.ShapeDtypeStruct(shape, sizes["dtype"]) for shape in shapes]
    placed = call.placed(sizes["T"], sizes["S"])
    assert kernel_of(placed, *qkv) is choice.KERNELS[way]


def test_a_kernel_can_be_forced():
    call = call_of("cuda", 256, kernel="xla").placed(256, 256)
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")
    assert kernel_of(call, q, q, q) is choice.KERNELS["xla"]
    wide = jax.ShapeDtypeStruct((1, 256, 2, 64), "float32")
    with pytest.raises(InputError, match="'cudnn' cannot run on cuda: use xla"):
        kernel_of(call_of("cuda", 256, kernel="cudnn").placed(256, 256), wide, wide, wide)


@pytest.mark.parametrize(
    ("capability", "widths", "way"),
    [
        ("9.0", (192, 128), "cudnn"),
        ("10.0", (192, 128), "cudnn"),
        ("8.0", (192, 128), "xla"),
        ("9.0", (128, 192), "xla"),
    ],
)
def test_latent_attention_is_fused_from_hopper_on(capability, widths, way):
    """One kernel each way for DeepSeek's heads of 192, with values of 128, though the GPU is absent."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    call = call_of("cuda", 256)
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
        assert kernel_of(call.placed(256, 256), q, k, v) is choice.KERNELS[way]
        if way == "cudnn":
            assert kernels(lambda *qkv: attention(call, *qkv), q, k, v) == ["__cudnn$fmhaSoftmax"]
            backward = kernels(lambda *given: attention_backward(call, given[:3], *given[3:]), dout, o, lse, q, k, v)
            assert backward == ["__cudnn$fmhaSoftmaxBackward"]


@pytest.mark.parametrize("window", [None, 40])
def test_cudnn_runs_one_kernel_each_way(monkeypatch, window):
    """Lowered for CUDA: one forward kernel, and backward its own kernel without a second forward one."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    arrays = {n: jnp.asarray(x, jnp.bfloat16) for n, x in rules.arrays(T=128, H=64).items()}
    call = call_of("cuda", 128, mask="causal" if window is None else f"sliding_window({window})")
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
    ("mask", "score"),
    [
        ("documents", "softcap(3)"),
        pytest.param("tree", "relative(0.1)", marks=pytest.mark.slow),
        *(pytest.param(mask, None, marks=pytest.mark.slow) for mask in rules.MASKS if mask != "graph"),
    ],
)
def test_kernels_of_tpus_give_what_dense_attention_gives(monkeypatch, mask, score):
    """Interpreted: lengths that no block divides, rows in another order, sinks."""
    monkeypatch.setattr(pallas_tpu, "BLOCKS", (128, 128))
    for name in ("forward", "backward"):
        monkeypatch.setattr(choice.Fused, name, partialmethod(getattr(choice.Fused, name), interpret=True))
    length = 300
    given = rules.arrays(T=length, N=2, K=1, H=16)
    made, _ = rules.rule_of(mask, None, length)
    own = score and rules.score_of(score, length)
    sinks = np.array([0.5, -1.0], np.float32)
    wanted = rules.expected(0.3, made, own, sinks, given)
    order = np.random.default_rng(0).permutation(length).astype(np.int32)
    for index in (None, order):
        call = AttentionCall(
            scale=0.3, mask=made, score=own, sinks=sinks, q_idx=index, kv_idx=index, platform="tpu", kernel="pallas"
        )
        moved = {n: jnp.asarray(x if index is None else x[:, order]) for n, x in given.items()}

        @jax.jit
        def both(given, call=call):
            qkv = [given[n] for n in "qkv"]
            o, lse = attention(call, *qkv)
            return o, lse, *attention_backward(call, (given["dout"], o, lse), *qkv)

        for number, (value, one) in enumerate(zip(both(moved), wanted, strict=True)):
            rules.close(value, one if index is None or number > 4 else one[:, order], f"result {number}")


def test_a_table_by_queries_and_keys_is_for_xla():
    made, _ = rules.rule_of("graph", None, 300)
    call = AttentionCall(scale=0.3, mask=made, platform="tpu", kernel="pallas")
    given = rules.arrays(T=300, N=2, K=1, H=16)
    with pytest.raises(InputError, match="kernel 'pallas' cannot run on tpu: use xla, or omit it"):
        attention(call, *(given[n] for n in "qkv"))


def test_private_parts_of_jax_are_where_they_are_looked_for():
    """cuDNN's backward rule is reached by a private name, which a new version of JAX may move."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert callable(cudnn._dot_product_attention_bwd_rule)
