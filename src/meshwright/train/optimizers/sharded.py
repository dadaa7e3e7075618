"""Runs the derived steps of an optimizer on shards of weights, in `shard_map` or on one device."""

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


class WeightLayout(NamedTuple):
    """The mesh, None for one device, and the sharding of every weight in its optimizer."""

    mesh: Mesh | AbstractMesh | None
    weights: Mapping[str, Updated]


def on_one_device(model: Model) -> WeightLayout:
    """Returns the layout of a model's weights on one device."""
    return WeightLayout(None, derive(transformer(model), Strategy(mesh={})).weights)


def on_shards(
    body: Callable[..., tuple[jax.Array, ...]],
    layout: WeightLayout,
    given: Mapping[ShardedArray, jax.Array],
    results: Sequence[ShardedArray],
) -> tuple[jax.Array, ...]:
    """Runs ``body`` on each device's shards of the arrays ``given``; it returns shards of ``results``."""
    if layout.mesh is None:
        return body(*given.values())
    specs = tuple(partition_spec(array) for array in given)
    out = tuple(partition_spec(array) for array in results)
    return jax.shard_map(body, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(*given.values())
