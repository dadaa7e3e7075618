"""Runs the derived steps of an optimizer on the shards of weights, in `shard_map` or on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright.algebra.derive import derive
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.transformer import transformer
from meshwright.parallel.mesh import partition_spec
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy


class Places(NamedTuple):
    """Where arrays lie: the mesh, None for one device, and every weight as its optimizer has it."""

    mesh: Mesh | AbstractMesh | None
    weights: Mapping[str, Updated]


def on_one_device(model: Model) -> Places:
    """Every weight of a model whole."""
    return Places(None, derive(transformer(model), Strategy(mesh={})).weights)


def on_shards(
    body: Callable[..., tuple[jax.Array, ...]],
    places: Places,
    given: Mapping[ShardedArray, jax.Array],
    results: Sequence[ShardedArray],
) -> tuple[jax.Array, ...]:
    """``body`` of each device's blocks of the arrays ``given``, which makes blocks of ``results``."""
    if places.mesh is None:
        return body(*given.values())
    specs = tuple(partition_spec(array) for array in given)
    out = tuple(partition_spec(array) for array in results)
    return jax.shard_map(body, mesh=places.mesh, in_specs=specs, out_specs=out, check_vma=False)(*given.values())
