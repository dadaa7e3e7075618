"""Steps of norms, rotations, look-ups, activations and the other elementwise kinds: what each takes from its step."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn.collectives import first_index
from meshwright.nn.context import Context
from meshwright.nn.ops import activations, norms, positions
from meshwright.nn.ops import elementwise as ops

LocalKind = Callable[..., Any]


def backward_of(forward: LocalKind) -> LocalKind:
    """Cotangents of the inputs from that of the result and the inputs: the vjp of the forward function."""

    def backward(context: Context, step: Step, dout: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        _, vjp = jax.vjp(lambda *given: forward(context, step, *given), *inputs)
        return tuple(vjp(dout))

    return backward


# -- norms --------------------------------------------------------------------------------------------


def _form(context: Context, scale_name: str) -> norms.RmsForm:
    return norms.rms_form(context.model, latent=scale_name.startswith(norms.LATENT_NORMS))


def rms_norm(context: Context, step: Step, x: jax.Array, scale: jax.Array) -> jax.Array:
    return norms.rms_norm(x, scale, _form(context, step.inputs[1].name))


def rms_norm_backward(context: Context, step: Step, dout: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    return norms.rms_norm_backward(dout, x, scale, _form(context, step.inputs[2].name))


def layer_norm(context: Context, step: Step, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return norms.layer_norm(x, scale, bias, eps=context.model.norm_eps)


def layer_norm_backward(context: Context, step: Step, dout: jax.Array, x: jax.Array, scale: jax.Array) -> Any:
    return norms.layer_norm_backward(dout, x, scale, eps=context.model.norm_eps)


# -- rotations ----------------------------------------------------------------------------------------


def _rotation(context: Context, step: Step) -> Callable[[jax.Array], positions.Rotation]:
    """The rotation for positions whose local part is given: some scalings depend on the length of the sequence."""
    ways = math.prod(context.mesh[axis] for axis in step.inputs[1].axes_of("T"))
    local = step.block.endswith("_local")
    return lambda here: positions.rotation(context.model, local=local, seq_len=context.seq_len or here.shape[1] * ways)


def rope(context: Context, step: Step, x: jax.Array, here: jax.Array) -> jax.Array:
    return positions.rope(x, here, _rotation(context, step)(here))


def rope_backward(context: Context, step: Step, dout: jax.Array, here: jax.Array) -> jax.Array:
    return positions.rope_backward(dout, here, _rotation(context, step)(here))


# -- look-ups -----------------------------------------------------------------------------------------


def embed(context: Context, step: Step, tokens: jax.Array, table: jax.Array) -> jax.Array:
    array = step.inputs[1]
    first_row = first_index(array.axes_of(array.dims[0]), table.shape[0])
    return ops.embed(tokens, table, first_row=first_row, scale=ops.embed_scale(context.model, table.dtype))


def embed_backward(context: Context, step: Step, tokens: jax.Array, dout: jax.Array) -> jax.Array:
    rows = step.result.dims[0]
    num_rows = context.local_size(step.result, rows)
    return ops.embed_backward(
        tokens,
        dout,
        first_row=first_index(step.result.axes_of(rows), num_rows),
        num_rows=num_rows,
        scale=ops.embed_scale(context.model, dout.dtype),
    )


# -- elementwise --------------------------------------------------------------------------------------


def gated(context: Context, step: Step, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activations.gate(context.model)(gate, up)


def plain(context: Context, step: Step, up: jax.Array) -> jax.Array:
    return activations.activation(context.model)(up)


def bias_add(context: Context, step: Step, x: jax.Array, bias: jax.Array) -> jax.Array:
    dims, of_bias = (array.dims for array in step.inputs)
    return ops.bias_add(x, bias, at=tuple(dims.index(dim) for dim in of_bias))


def bias_add_backward(context: Context, step: Step, dout: jax.Array) -> jax.Array:
    dims = step.inputs[0].dims
    return jnp.sum(dout, axis=tuple(i for i, dim in enumerate(dims) if dim not in step.result.dims))


def join_heads(context: Context, step: Step, own: jax.Array, shared: jax.Array) -> jax.Array:
    return ops.join_heads(own, shared)


def join_heads_backward(context: Context, step: Step, dout: jax.Array) -> Any:
    return ops.join_heads_backward(dout, own_width=context.model.qk_nope_head_dim)


def token_gate(context: Context, step: Step, y: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
    return ops.token_gate(y, x, weight)


LAYER_KINDS: dict[str, LocalKind] = {
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "rope": rope,
    "rope_backward": rope_backward,
    "embed": embed,
    "embed_backward": embed_backward,
    "silu_mul": gated,
    "silu_mul_backward": backward_of(gated),
    "gelu_mul": gated,
    "gelu_mul_backward": backward_of(gated),
    "gelu": plain,
    "gelu_backward": backward_of(plain),
    "bias_add": bias_add,
    "bias_add_backward": bias_add_backward,
    "join_heads": join_heads,
    "join_heads_backward": join_heads_backward,
    "token_gate": token_gate,
    "token_gate_backward": backward_of(token_gate),
}
"""Kinds of steps inside layers, forward and backward; those of attention, experts and the loss are with theirs."""
