"""Which array first held a value that is no number, found on the devices in one small program."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath

from meshwright.algebra.transformer import layer_kinds, local_name, weight_variables
from meshwright.spec.model import Model


def non_finite(tree: Any, model: Model) -> str | None:
    """The first array with a NaN or an infinity: "layers.wq of layer 3 holds NaN"; None when all are finite.

    ``tree`` is any tree of arrays; those under the name of a weight come first, in the order of the program, and
    those of the layers are told apart by layer.
    """
    layers = _layers(model)
    order = {name: place for place, name in enumerate(layers)}
    found = [(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if _is_float(leaf)]
    if not found:
        return None
    found.sort(key=lambda item: order.get(_weight(item[0], order) or "", len(order)))
    names = [_weight(path, order) for path, _ in found]
    stacked = tuple(
        bool(name and layers[name][1]) and leaf.ndim > 0 for name, (_, leaf) in zip(names, found, strict=True)
    )
    flags = _flags_on(_mesh(found[0][1]))([leaf for _, leaf in found], stacked)
    for (path, _), name, flag in zip(found, names, flags, strict=True):
        nan, infinite = np.asarray(flag)
        bad = nan | infinite
        if bad.any():
            index = int(bad.argmax())
            return f"{_words(path, name, layers, index)} holds {'NaN' if nan[index] else 'infinity'}"
    return None


def _layers(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Variable of the program, in its order -> the weight's name and the layers that are stacked in it."""
    kinds = layer_kinds(model)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for variable, (weight, _) in weight_variables(model).items():
        mine: tuple[int, ...] = ()
        for kind in kinds if weight.layers else ():
            if variable == local_name(weight) + (kind.suffix if len(kinds) > 1 else ""):
                mine = tuple(sorted(set(kind.layers) & set(weight.layers)))
        found[variable] = (weight.name, mine)
    return found


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _weight(path: KeyPath, known: Mapping[str, Any]) -> str | None:
    keys = [key.key for key in path if isinstance(key, DictKey) and key.key in known]
    return keys[-1] if keys else None


def _words(path: KeyPath, name: str | None, layers: Mapping[str, tuple[str, tuple[int, ...]]], index: int) -> str:
    """``inner.mu: layers.wq of layer 3``, without what stands before the weight where nothing does."""
    keys = [str(next(getattr(key, part) for part in ("key", "name", "idx") if hasattr(key, part))) for key in path]
    if name is None:
        return ".".join(keys)
    before, (weight, mine) = ".".join(key for key in keys if key != name), layers[name]
    return f"{before}: " * bool(before) + weight + (f" of layer {mine[index]}" if mine else "")


@lru_cache
def _flags_on(mesh: Mesh | None) -> Any:
    """Jitted (arrays, which are stacked) -> [2, layers or 1] booleans each, NaN and infinity, on every device."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(_flags, static_argnums=1, out_shardings=everywhere)


def _flags(arrays: list[jax.Array], stacked: tuple[bool, ...]) -> list[jax.Array]:
    def flags(array: jax.Array, by_layer: bool) -> jax.Array:
        over = tuple(range(by_layer, array.ndim))
        return jnp.stack([jnp.isnan(array).any(over).reshape(-1), jnp.isinf(array).any(over).reshape(-1)])

    return [flags(array, by_layer) for array, by_layer in zip(arrays, stacked, strict=True)]


def _mesh(array: Any) -> Mesh | None:
    mesh = getattr(getattr(array, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None
