"""What an executor of pipeline schedules is given: the passes of one virtual stage, and a device's weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Tree = Any
"""A pytree of arrays."""

Stream = jax.Array
"""What one virtual stage hands to the next, [B, T, D] on a device; and its cotangent."""


def as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """What the passes do, as pure functions that run inside `shard_map`; static shapes, no permutes.

    ``layers`` are the weights of one virtual stage, ``ends`` those outside the layers, ``inputs`` those of one
    microbatch. Gradients of the ends are dicts by name, of the weights that a function uses. ``forward`` and
    ``head_forward`` come with what their backward passes need. A B without W runs ``backward``; with one it runs
    ``input_backward``, which hands on what ``weight_backward`` needs. ``head_forward`` gives a pytree of sums over
    the microbatch, the loss among them. ``send`` is what a device passes on of the stream where all of a group have
    the same, ``receive`` makes it whole again.
    """

    embed: Callable[[Tree, Tree], Stream]
    embed_backward: Callable[[Tree, Tree, Stream], dict[str, jax.Array]]
    forward: Callable[[Tree, Tree, Stream], tuple[Stream, Tree]]
    backward: Callable[[Tree, Tree, Tree, Stream], tuple[Stream, Tree]]
    input_backward: Callable[[Tree, Tree, Tree, Stream], tuple[Stream, Tree]] | None = None
    weight_backward: Callable[[Tree, Tree, Tree], Tree] | None = None
    head_forward: Callable[[Tree, Tree, Stream], tuple[Tree, Tree]]
    head_backward: Callable[[Tree, Tree, Tree], tuple[Stream, dict[str, jax.Array]]]
    send: Callable[[Stream], Stream] = as_it_is
    receive: Callable[[Stream], Stream] = as_it_is
    send_back: Callable[[Stream], Stream] = as_it_is
    receive_back: Callable[[Stream], Stream] = as_it_is


class Weights(NamedTuple):
    """Arrays of a device: ``layers`` with all its layers in front, ``ends`` by name; or their gradients."""

    layers: Tree
    ends: dict[str, jax.Array]
