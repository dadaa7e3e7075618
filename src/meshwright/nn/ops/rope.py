"""Rotary positions: the frequencies of a model, stretched as it says, and the rotation, forward and backward.

Learned positions are a look-up like any other (`nn.ops.embed`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.spec.model import Model, RopeScaling, yarn_mscale


class Rotation(NamedTuple):
    """What rotates a head: radians per position of each pair, and where the pairs are.

    ``factor`` multiplies the cosines and sines. Pairs are (i, i + width / 2), or (2 i, 2 i + 1) when ``interleaved``;
    they lie in the first ``width`` = 2 x len(frequencies) entries of a head, or in its last ones.
    """

    frequencies: np.ndarray
    factor: float = 1.0
    interleaved: bool = False
    last: bool = False


def rotation(model: Model, *, local: bool = False, seq_len: int = 0) -> Rotation:
    """The rotation of a model's layers; ``local`` for the layers with a window, which may have their own theta.

    ``seq_len`` is the length of the whole sequence: longrope and dynamic scaling change beyond the length that the
    model was trained on.
    """
    width = model.qk_rope_head_dim if model.latent_attention else int(model.head_dim * model.rope_fraction)
    # Sliding layers with a theta of their own (gemma 3) are not stretched either.
    own_theta = model.rope_local_theta if local else None
    theta, scaling = (own_theta, None) if own_theta else (model.rope_theta, model.rope_scaling)
    frequencies, factor = _stretched(model, width, theta, scaling, seq_len)
    latent = model.latent_attention
    return Rotation(frequencies.astype(np.float32), factor, interleaved=latent, last=latent)


def _stretched(
    model: Model, width: int, theta: float, scaling: RopeScaling | None, seq_len: int
) -> tuple[np.ndarray, float]:
    """Frequencies, and the factor of the cosines and sines."""
    kind = scaling.kind if scaling else "default"
    if scaling is None or kind == "default":
        return _frequencies(width, theta), 1.0
    if kind == "linear":
        return _frequencies(width, theta) / np.float32(scaling.factor), 1.0
    if kind == "llama3":
        return _llama3(_frequencies(width, theta), scaling), 1.0
    if kind == "dynamic":
        return _frequencies(width, _dynamic_theta(model, width, theta, scaling, seq_len)), 1.0
    if kind == "yarn":
        return _yarn(width, theta, scaling, model.max_positions), _yarn_factor(scaling)
    if kind == "longrope":
        return _longrope(width, theta, scaling, model.max_positions, seq_len)
    raise AssertionError(f"rope scaling {kind} is not known")


def _frequencies(width: int, theta: float) -> np.ndarray:
    """``theta ** (-2 i / width)`` in float32, as the checkpoints were trained with."""
    powers = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1.0) / np.float32(theta) ** powers


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths divided by ``factor``, short ones kept, a linear blend between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_positions
    if low is None or high is None or original is None:
        raise AssertionError("llama3 rope scaling lacks its factors")
    wavelengths = 2 * math.pi / frequencies
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def _dynamic_theta(model: Model, width: int, theta: float, scaling: RopeScaling, seq_len: int) -> float:
    """Theta raised with the length of the sequence (NTK-aware scaling)."""
    stretch = scaling.factor * max(seq_len, model.max_positions) / model.max_positions - (scaling.factor - 1)
    return theta * stretch ** (width / (width - 2))


def _yarn(width: int, theta: float, scaling: RopeScaling, max_positions: int) -> np.ndarray:
    """Slow rotations divided by ``factor``, fast ones kept, a ramp over the pairs between. Source: YaRN, 2309.00071."""
    original = scaling.original_max_positions or max_positions

    def pair_of(turns: float) -> float:
        """The pair that turns this often over the original length."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast or 32.0), pair_of(scaling.beta_slow or 1.0)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = (high - low) or 0.001
    slow = np.clip((np.arange(width // 2, dtype=np.float32) - low) / span, 0, 1)
    frequencies = _frequencies(width, theta)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def _longrope(
    width: int, theta: float, scaling: RopeScaling, max_positions: int, seq_len: int
) -> tuple[np.ndarray, float]:
    """Each pair stretched by a factor of its own, of one list or of another beyond the original length (Phi-3)."""
    original = scaling.original_max_positions or max_positions
    factors = scaling.long_factor if seq_len > original else scaling.short_factor
    factor = scaling.attention_factor
    if factor is None:
        stretch = scaling.factor
        factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return _frequencies(width, theta) / np.asarray(factors, np.float32), factor


# -- the rotation -----------------------------------------------------------------------------------


def rope(x: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], how: Rotation) -> Float[Array, "B T *heads H"]:
    """Each pair of a head turned by position times frequency; the rest of the head as it is."""
    return _turned(x, positions, how, direction=1.0)


def rope_backward(
    dout: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], how: Rotation
) -> Float[Array, "B T *heads H"]:
    """The cotangent turned back."""
    return _turned(dout, positions, how, direction=-1.0)


def _turned(x: Array, positions: Array, how: Rotation, *, direction: float) -> Array:
    half = len(how.frequencies)
    rest = x.shape[-1] - 2 * half
    start = rest if how.last else 0
    inside = x if not rest else x[..., start : start + 2 * half]
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(how.frequencies)[None, None]
    if x.ndim == 4:
        angles = angles[:, :, None]
    cos, sin = how.factor * jnp.cos(angles), how.factor * direction * jnp.sin(angles)
    turned = _turned_pairs(inside.astype(jnp.float32), cos, sin, interleaved=how.interleaved).astype(x.dtype)
    if not rest:
        return turned
    return jnp.concatenate([x[..., :start], turned, x[..., start + 2 * half :]], axis=-1)


def _turned_pairs(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotation(context: Context, step: Step) -> Callable[[jax.Array], Rotation]:
    """The rotation for positions whose local part is given: some scalings depend on the length of the sequence."""
    ways = math.prod(context.mesh[axis] for axis in step.inputs[1].axes_of(step.inputs[1].dims[1]))
    local = step.block.endswith("_local")
    return lambda here: rotation(context.model, local=local, seq_len=context.seq_len or here.shape[1] * ways)


def _rope(context: Context, step: Step, x: jax.Array, here: jax.Array) -> jax.Array:
    return rope(x, here, _rotation(context, step)(here))


def _rope_backward(context: Context, step: Step, dout: jax.Array, here: jax.Array) -> jax.Array:
    return rope_backward(dout, here, _rotation(context, step)(here))


STEPS = {"rope": _rope, "rope_backward": _rope_backward}
