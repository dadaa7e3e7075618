"""Muon: the momentum of each matrix orthogonalised, for arrays that hold a matrix per layer and expert."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshwright.nn.weights import Params
from meshwright.train.optimizers.matrices import MatrixAxes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x^3 + c x^5, steep at 0 and between 0.7 and 1.2 after five turns. Source: Jordan."""

TURNS = 5
MATCHED_RMS = 0.2
"""RMS of an update, that of AdamW in practice, so that both take one learning rate. Source: Liu et al., section 2.2."""


class MuonState(NamedTuple):
    """Updates done, and the running mean of the gradients."""

    count: Any
    momentum: Params


class Places(NamedTuple):
    """Where the arrays lie: the mesh, and the sharding of each array's gradients and moments by name."""

    mesh: Mesh | AbstractMesh
    specs: Mapping[str, PartitionSpec]


def scale_by_muon(
    axes: Mapping[str, MatrixAxes], *, momentum: float, places: Callable[[], Places] | None = None
) -> optax.GradientTransformation:
    """Nesterov momentum of every matrix, orthogonalised, times 0.2 sqrt(max(inputs, outputs)).

    With ``places`` whole matrices are dealt out to the devices that share them; without, GSPMD chooses.
    Source: Jordan, Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025 (the scale).
    """

    def init(params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

    def update(grads: Params, state: MuonState, params: Params | None = None) -> tuple[Params, MuonState]:
        count = state.count + 1
        means = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.momentum, grads)
        # Both parts as unbiased means: the one looks an update ahead, the other is of this update.
        ahead, now = (1 - momentum ** (count + extra).astype(jnp.float32) for extra in (1, 0))
        mixed = {n: momentum * means[n] / ahead + (1 - momentum) * grad / now for n, grad in grads.items()}
        if places is None:
            return {name: orthogonal(mixed[name], axes[name]) for name in grads}, MuonState(count, means)
        mesh, specs = places()
        return {name: dealt(mixed[name], axes[name], mesh, specs[name]) for name in grads}, MuonState(count, means)

    return optax.GradientTransformation(init, update)


def orthogonal(values: jax.Array, axes: MatrixAxes) -> jax.Array:
    """Every matrix U S V^T of ``values`` as nearly U V^T, scaled to a root mean square of about `MATCHED_RMS`."""
    flat = axes.flat_shape(values.shape)
    scale = MATCHED_RMS * max(flat[-2:]) ** 0.5
    return scale * newton_schulz(values.reshape(flat)).reshape(values.shape)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Singular values of each matrix [..., in, out] brought near 1 by five turns of an odd polynomial."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the products of rows are then the smaller square
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + 1e-8)
    a, b, c = COEFFICIENTS

    def turn(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.mT
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, TURNS, turn, x)
    return x.mT if tall else x


def dealt(values: jax.Array, axes: MatrixAxes, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """`orthogonal` of a sharded array, each device working on whole matrices of some layers.

    One AllToAll per split dim brings a device's parts of all layers to whole matrices of its share of the layers,
    and one brings the results back. GSPMD gathers whole arrays in every turn instead. Layers are filled up with
    zeros to a multiple of the devices, so a device receives at most one matrix that it does not need.
    """
    parts: tuple[Any, ...] = (*spec, *[None] * (values.ndim - len(spec)))
    # Layers and experts become the dim 0 of a device's array.
    moves = [(axis - len(axes.batch) + 1, parts[axis]) for axis in axes.within if parts[axis]]
    shares = math.prod(mesh.shape[a] for _, part in moves for a in ((part,) if isinstance(part, str) else part))

    def body(here: jax.Array) -> jax.Array:
        counted = math.prod(here.shape[: len(axes.batch)])
        flat = here.reshape(counted, *here.shape[len(axes.batch) :])
        whole = jnp.pad(flat, [(0, -counted % shares), *[(0, 0)] * (flat.ndim - 1)])
        for axis, part in moves:
            whole = lax.all_to_all(whole, part, split_axis=0, concat_axis=axis, tiled=True)
        whole = orthogonal(whole, axes.counted_once())
        for axis, part in reversed(moves):
            whole = lax.all_to_all(whole, part, split_axis=axis, concat_axis=0, tiled=True)
        return whole[:counted].reshape(here.shape)

    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(values)
