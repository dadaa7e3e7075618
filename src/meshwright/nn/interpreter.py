"""Runs derived forward steps on one device's blocks. Backward is JAX's autodiff of what runs here."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.algebra.derive import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn import ops
from meshwright.nn.collectives import communicate, first_index
from meshwright.spec.model import Model

Environment = dict[ShardedArray, jax.Array]
Constrain = Callable[[ShardedArray, jax.Array], jax.Array]


def _as_given(array: ShardedArray, value: jax.Array) -> jax.Array:
    return value


class Interpreter:
    """Executes the steps of one derivation of one model.

    ``constrain`` is applied to every result that has its declared sharding: the GSPMD form passes
    `with_sharding_constraint` and a derivation without mesh axes; inside `shard_map` it does nothing.
    """

    def __init__(self, model: Model, derived: Derived, *, constrain: Constrain = _as_given) -> None:
        self.model, self.derived, self.constrain = model, derived, constrain
        self.keeps = frozenset(derived.keeps)

    def block(self, block: BlockSteps, values: Mapping[str, jax.Array], *, until: str = "") -> Environment:
        """Every result of one pass over a block, from the values of its inputs by name.

        Stops after the step whose result is named ``until``, if given.
        """
        env: Environment = {self.derived.declared[name]: value for name, value in values.items()}
        for step in block.forward:
            results = self._run(step, [env[a] for a in step.inputs])
            for array, value in zip((step.result, *step.more), results, strict=True):
                env[array] = self._named(array, value)
            if until and step.result.name == until:
                break
        return env

    def _named(self, array: ShardedArray, value: jax.Array) -> jax.Array:
        tag = self.derived.tag(array)
        if tag == array.name:
            value = self.constrain(array, value)
        return checkpoint_name(value, tag) if tag in self.keeps else value

    def _run(self, step: Step, inputs: list[jax.Array]) -> tuple[jax.Array, ...]:
        if step.is_collective or step.op == "slice":
            return (communicate(step, inputs[0]),)
        result = _LOCAL[step.op](self.model, step, *inputs)
        return result if isinstance(result, tuple) else (result,)


def einsum(step: Step, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The local contraction of a step: dims of the same name are the same dim."""
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*step.inputs[0].dims, *step.inputs[1].dims)))}
    left, right, out = ("".join(letters[d] for d in a.dims) for a in (*step.inputs, step.result))
    wide = jnp.float32 if step.result.dtype == "fp32" else None
    return jnp.einsum(f"{left},{right}->{out}", lhs, rhs, preferred_element_type=wide)


def _norm(model: Model, step: Step, x: jax.Array, scale: jax.Array) -> jax.Array:
    return ops.rms_norm(x, scale, eps=model.norm_eps)


def _rope(model: Model, step: Step, x: jax.Array, positions: jax.Array) -> jax.Array:
    return ops.rope(x, positions, frequencies=ops.rope_frequencies(model))


def _attention(model: Model, step: Step, *arrays: jax.Array) -> jax.Array:
    q, k, v, positions, key_positions = arrays
    return ops.attention(q, k, v, positions, key_positions, scale=model.attention_scale)


def _rows(array: ShardedArray, value: jax.Array) -> Any:
    """First vocabulary entry of a block of logits or of a table."""
    return first_index(array.axes_of("V"), value.shape[array.dims.index("V")])


def _embed(model: Model, step: Step, tokens: jax.Array, table: jax.Array) -> jax.Array:
    return ops.embed(tokens, table, first_row=_rows(step.inputs[1], table))


def _statistics(model: Model, step: Step, logits: jax.Array, labels: jax.Array) -> ops.Statistics:
    return ops.logits_statistics(logits, labels, first_row=_rows(step.inputs[0], logits))


def _chunked(model: Model, step: Step, x: jax.Array, table: jax.Array, labels: jax.Array) -> ops.Statistics:
    first_row = _rows(step.inputs[1], table)
    wide = table if step.inputs[1].dims == ("D", "V") else table.T
    return ops.chunked_logits_statistics(x, wide, labels, first_row=first_row)


_LOCAL: dict[str, Callable[..., Any]] = {
    "einsum": lambda model, step, lhs, rhs: einsum(step, lhs, rhs),
    "rms_norm": _norm,
    "rope": _rope,
    "attention": _attention,
    "add": lambda model, step, a, b: a + b,
    "silu_mul": lambda model, step, gate, up: ops.silu_mul(gate, up),
    "embed": _embed,
    "logits_statistics": _statistics,
    "chunked_logits_statistics": _chunked,
    "rescale": lambda model, step, *arrays: ops.rescale(*arrays),
    "sum_loss": lambda model, step, *arrays: ops.sum_loss(*arrays),
}
