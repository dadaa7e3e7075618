import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.nn.ops.rope import Rotation, rope, rotation
from meshwright.spec import catalogue
from meshwright.spec.model import RopeScaling
from tests.nn.families import LLAMA

BASE = replace(LLAMA, d_model=16, num_heads=2, head_dim=16)
POSITIONS = jnp.asarray([[0, 1, 2, 3, 4], [7, 9, 0, 1, 63]], jnp.int32)


def heads(width, *, seed=0, num=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 5, num, width)), jnp.float32)


def turned(x, positions, theta, pairs, width):
    """Pair by pair in float64; ``pairs`` are the places of the two entries, ``width`` what theta is spread over."""
    out = np.array(x, np.float64)
    for (b, t), position in np.ndenumerate(np.asarray(positions)):
        for number, (i, j) in enumerate(pairs):
            angle = float(position) * theta ** (-2 * number / width)
            first, second = (np.asarray(x, np.float64)[b, t, :, k] for k in (i, j))
            out[b, t, :, i] = first * math.cos(angle) - second * math.sin(angle)
            out[b, t, :, j] = second * math.cos(angle) + first * math.sin(angle)
    return out


@pytest.mark.parametrize(
    ("model", "width", "pairs"),
    [
        (BASE, 16, [(i, i + 8) for i in range(8)]),
        (replace(BASE, rope_fraction=0.5), 8, [(i, i + 4) for i in range(4)]),
        (
            replace(BASE, kv_lora_rank=4, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=4),
            6,
            [(10, 11), (12, 13), (14, 15)],
        ),
    ],
    ids=["whole-heads", "a-part", "latent"],
)
def test_rotation_is_the_formula(model, width, pairs):
    x = heads(16)
    expected = turned(x, POSITIONS, model.rope_theta, pairs, width)
    np.testing.assert_allclose(rope(x, POSITIONS, rotation(model)), expected, rtol=0, atol=1e-5)


def test_what_all_heads_share_is_rotated_alike():
    how = Rotation(np.asarray([1.0, 0.1], np.float32), interleaved=True, last=True)
    x = heads(4, num=1)
    np.testing.assert_array_equal(rope(x[:, :, 0], POSITIONS, how), rope(x, POSITIONS, how)[:, :, 0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_backward_is_the_transpose(interleaved, last):
    how = Rotation(np.asarray([1.0, 0.3, 0.1], np.float32), factor=1.3, interleaved=interleaved, last=last)
    x, dout = heads(8), heads(8, seed=1)
    expected = jax.vjp(lambda a: rope(a, POSITIONS, how), x)[1](dout)[0]
    np.testing.assert_allclose(rope(dout, POSITIONS, how, direction=-1.0), expected, rtol=0, atol=1e-5)


def test_sliding_layers_of_gemma3_have_a_theta_of_their_own_and_no_stretch():
    model = replace(catalogue.model("gemma3-27b"), rope_scaling=RopeScaling(kind="linear", factor=8.0))
    far, near = rotation(model), rotation(model, local=True)
    assert far.frequencies[0] == 1 / 8
    assert near.frequencies[0] == 1
    half = model.head_dim // 2
    assert near.frequencies[-1] == pytest.approx(10000.0 ** (-(half - 1) / half), rel=1e-5)
    assert far.frequencies[-1] == pytest.approx(1e6 ** (-(half - 1) / half) / 8, rel=1e-5)


LONGROPE = RopeScaling(
    kind="longrope",
    factor=4.0,
    original_max_positions=16,
    short_factor=tuple(1 + i / 10 for i in range(8)),
    long_factor=tuple(2.0 + i for i in range(8)),
)


def test_longrope_takes_its_long_list_beyond_the_original_length():
    model = replace(BASE, rope_scaling=LONGROPE)
    short, long = rotation(model, seq_len=16), rotation(model, seq_len=17)
    ratios = np.asarray(LONGROPE.long_factor, np.float32) / np.asarray(LONGROPE.short_factor, np.float32)
    np.testing.assert_allclose(short.frequencies / long.frequencies, ratios, rtol=1e-6)
    assert short.factor == long.factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


SCALINGS = {
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
    ),
    "dynamic": RopeScaling(kind="dynamic", factor=2.0),
    "yarn": RopeScaling(kind="yarn", factor=8.0, original_max_positions=16),
    "yarn-exact": RopeScaling(
        kind="yarn", factor=8.0, original_max_positions=16, truncate=False, beta_fast=4.0, beta_slow=0.5
    ),
    "yarn-mscale": RopeScaling(kind="yarn", factor=8.0, original_max_positions=16, mscale=1.0, mscale_all_dim=0.7),
    "longrope": LONGROPE,
}


@pytest.mark.peer
@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("seq_len", [12, 100])
def test_frequencies_are_those_of_transformers(kind, seq_len):
    pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from meshwright.spec.hf.write import config_from_model

    model = replace(BASE, rope_scaling=SCALINGS[kind])
    config = transformers.LlamaConfig(**config_from_model(model))
    theirs, factor = ROPE_INIT_FUNCTIONS[SCALINGS[kind].kind](config, "cpu", seq_len=seq_len)
    how = rotation(model, seq_len=seq_len)
    np.testing.assert_allclose(how.frequencies, theirs.numpy(), rtol=2e-6)
    assert how.factor == pytest.approx(factor)
