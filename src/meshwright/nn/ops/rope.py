"""Rotary position embedding: frequencies with the model's scaling, and the rotation, forward and backward.

Learned positions are an embedding lookup (`nn.ops.embed`).
"""

import math
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.spec.model import Model, RopeScaling, yarn_mscale


class Rotation(NamedTuple):
    """Rotation of a head: radians per position of each pair, and the layout of the pairs.

    ``factor`` multiplies the cosines and sines. Pairs are (i, i + width / 2), or (2 i, 2 i + 1) when ``interleaved``;
    they are the first ``width`` = 2 x len(frequencies) entries of a head, or its last ones.
    """

    frequencies: np.ndarray
    factor: float = 1.0
    interleaved: bool = False
    last: bool = False


def rotation(model: Model, *, local: bool = False, seq_len: int = 0, width: int = 0) -> Rotation:
    """Returns the rotation of a model's layers; ``local`` for layers with a window, which may have their own theta.

    ``width`` is the heads' width if it is not the model's. ``seq_len`` is the length of the whole sequence: longrope
    and dynamic scaling depend on it if it is more than the length that the model was trained on.
    """
    is_latent, rotated_width = model.latent_attention, model.rotated_width
    if width and not is_latent:
        rotated_width = int(width * model.rope_fraction)
    # Sliding layers with their own theta (gemma 3) are not scaled.
    own_theta = model.rope_local_theta if local else None
    theta, scaling = (own_theta, None) if own_theta else (model.rope_theta, model.rope_scaling)
    freqs, factor = _frequencies(rotated_width, theta), 1.0
    scaling_kind = scaling.kind if scaling else "default"
    if scaling is None or scaling_kind == "default":
        pass
    elif scaling_kind == "proportional":
        freqs = (
            freqs * (np.arange(len(freqs)) < int(scaling.fraction * rotated_width // 2)) / np.float32(scaling.factor)
        )
    elif scaling_kind == "linear":
        freqs = freqs / np.float32(scaling.factor)
    elif scaling_kind == "llama3":
        freqs = _llama3(freqs, scaling)
    elif scaling_kind == "dynamic":
        # theta raised with the length of the sequence (NTK-aware scaling)
        stretch = scaling.factor * max(seq_len, model.max_positions) / model.max_positions - (scaling.factor - 1)
        freqs = _frequencies(rotated_width, theta * stretch ** (rotated_width / (rotated_width - 2)))
    elif scaling_kind == "yarn":
        freqs = _yarn(freqs, theta, scaling, model.max_positions)
        factor = _yarn_factor(scaling)
    elif scaling_kind == "longrope":
        freqs, factor = _longrope(freqs, scaling, model.max_positions, seq_len)
    else:
        raise AssertionError(f"rope scaling {scaling_kind} is not known")
    return Rotation(freqs.astype(np.float32), factor, interleaved=is_latent or model.rope_interleaved, last=is_latent)


def _frequencies(width: int, theta: float) -> np.ndarray:
    """Returns ``theta ** (-2 i / width)`` in float32, as the checkpoints were trained with."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1.0) / np.float32(theta) ** exponents


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divides long wavelengths by ``factor``, keeps short ones, and blends linearly between them (Llama 3.1)."""
    low_factor, high_factor = scaling.low_freq_factor, scaling.high_freq_factor
    original_len = scaling.original_max_positions
    if low_factor is None or high_factor is None or original_len is None:
        raise AssertionError("llama3 rope scaling lacks its factors")
    wavelengths = 2 * math.pi / frequencies
    span = (high_factor - low_factor) or 1e-9  # where both are one, as Llama 4's, nothing blends
    blend = np.clip((original_len / wavelengths - low_factor) / span, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def _yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling, max_positions: int) -> np.ndarray:
    """Divides low frequencies by ``factor``, keeps high ones, ramps between them. Source: Peng et al., YaRN (2023)."""
    rotated_width, original_len = 2 * len(frequencies), scaling.original_max_positions or max_positions

    def pair_of(turns: float) -> float:
        """Returns the fractional index of the pair that rotates this many times over the original length."""
        return rotated_width * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low_pair, high_pair = pair_of(scaling.beta_fast or 32.0), pair_of(scaling.beta_slow or 1.0)
    if scaling.truncate:
        low_pair, high_pair = math.floor(low_pair), math.ceil(high_pair)
    low_pair, high_pair = max(low_pair, 0), min(high_pair, rotated_width - 1)
    ramp_pairs = (high_pair - low_pair) or 0.001
    slow_share = np.clip((np.arange(rotated_width // 2, dtype=np.float32) - low_pair) / ramp_pairs, 0, 1)
    return frequencies / scaling.factor * slow_share + frequencies * (1 - slow_share)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def _longrope(
    frequencies: np.ndarray, scaling: RopeScaling, max_positions: int, seq_len: int
) -> tuple[np.ndarray, float]:
    """Scales each pair by its own factor, from a second list beyond the original length (Phi-3)."""
    original_len = scaling.original_max_positions or max_positions
    factors = scaling.long_factor if seq_len > original_len else scaling.short_factor
    trig_factor = scaling.attention_factor
    if trig_factor is None:
        stretch = scaling.factor
        trig_factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original_len))
    return frequencies / np.asarray(factors, np.float32), trig_factor


# -- the rotation -----------------------------------------------------------------------------------


def rope(
    x: Float[Array, "B T *heads H"], positions: Int[Array, "B T"], how: Rotation, *, direction: float = 1.0
) -> Float[Array, "B T *heads H"]:
    """Rotates each pair of a head by position times frequency; ``direction`` is -1 for a cotangent."""
    num_pairs = len(how.frequencies)
    num_unrotated = x.shape[-1] - 2 * num_pairs
    first_rotated = num_unrotated if how.last else 0
    part = x if not num_unrotated else x[..., first_rotated : first_rotated + 2 * num_pairs]
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(how.frequencies)[None, None]
    if x.ndim == 4:
        angles = angles[:, :, None]
    cos, sin = how.factor * jnp.cos(angles), how.factor * direction * jnp.sin(angles)
    wide_part = part.astype(jnp.float32)
    x1, x2 = (wide_part[..., 0::2], wide_part[..., 1::2]) if how.interleaved else jnp.split(wide_part, 2, axis=-1)
    pair = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    rotated = jnp.stack(pair, axis=-1).reshape(part.shape) if how.interleaved else jnp.concatenate(pair, axis=-1)
    rotated = rotated.astype(x.dtype)
    if not num_unrotated:
        return rotated
    return jnp.concatenate([x[..., :first_rotated], rotated, x[..., first_rotated + 2 * num_pairs :]], axis=-1)


def _rope(context: Context, step: Step, x: Array, here: Array, *, direction: float = 1.0) -> Array:
    """Rotates by local positions; some scalings depend on the length of the whole sequence."""
    num_shards = math.prod(context.mesh[axis] for axis in step.inputs[1].axes[1])
    seq_len = context.seq_len or here.shape[1] * num_shards
    how = rotation(context.model, local=step.block.endswith("_local"), seq_len=seq_len, width=x.shape[-1])
    return rope(x, here, how, direction=direction)


STEPS = {"rope": _rope, "rope_backward": partial(_rope, direction=-1.0)}
