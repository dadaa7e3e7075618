"""Key and value heads that ``tensor`` does not divide: they are repeated, so that every device has those of its own
queries. The weights of keys and values are whole over ``tensor`` then."""

import math

from msgspec.structs import replace

from meshwright.algebra.program import Block, Op, Program, Variable
from meshwright.spec.strategy import GENERATION_RULES, REPEATED_HEADS, Strategy

READERS = ("attention", "cache_write")
"""Ops that need the keys and values of the device's own queries."""
KV_HEADS = {"K", "Kf"}
"""Dims of kv heads, which are repeated as Kt and Kft, or Kct and Kfct."""


def repeated_dim(strategy: Strategy) -> str:
    """Returns the dim of repeated kv heads: Kct where ulysses splits heads over ``context`` too, else Kt."""
    return "Kct" if strategy.context_attention == "ulysses" else "Kt"


def with_repeated_heads(strategy: Strategy) -> Strategy:
    """Returns the strategy with its rules of kv heads for repeated ones: no axis splits K itself then."""
    new_dim, old_rules = repeated_dim(strategy), GENERATION_RULES | strategy.assignment
    new_rules = {
        role: {new_dim if dim == "K" else dim: axes for dim, axes in rules.items()} for role, rules in old_rules.items()
    }
    return replace(strategy, assignment=new_rules)


def strategy_of_heads(strategy: Strategy, num_kv_heads: int) -> Strategy:
    """Returns the strategy with repeated kv heads where the devices that split the heads do not divide their number;
    of layers with several numbers, all of them."""
    num_devices = math.prod(strategy.mesh.get(axis, 1) for axis in REPEATED_HEADS[repeated_dim(strategy)])
    is_standard = strategy.rules("activation").get("K") == ("tensor",)
    return with_repeated_heads(strategy) if is_standard and num_kv_heads % num_devices else strategy


def repeating(program: Program, strategy: Strategy) -> Program:
    """Returns the program in which attention reads, and caches hold, the kv heads that the strategy's rules name."""
    dim = next((dim for dim in REPEATED_HEADS if dim in strategy.rules("activation")), "")
    if not dim:
        return program
    cache_by_name = {v.name: replace(v, dims=_renamed(v.dims, dim)) for v in program.of_role("cache")}
    variables = program.variables | cache_by_name
    blocks = tuple(replace(block, ops=_ops(block, variables, dim)) for block in program.blocks)
    return replace(program, blocks=blocks, variables=variables)


def _renamed(dims: tuple[str, ...], new_dim: str) -> tuple[str, ...]:
    return tuple(new_dim.replace("K", old_dim) if old_dim in KV_HEADS else old_dim for old_dim in dims)


def _ops(block: Block, variables: dict[str, Variable], dim: str) -> tuple[Op, ...]:
    """Returns the ops of a block with repeats before the first op that reads them; adds their results to
    ``variables``."""
    ops, repeat_of = list[Op](), dict[str, str]()
    for op in block.ops:
        for name in op.inputs if op.kind in READERS else ():
            variable = variables[name]
            if not KV_HEADS.isdisjoint(variable.dims) and name not in repeat_of:
                repeat_of[name] = f"{name}_repeated"
                variables[repeat_of[name]] = replace(variable, name=repeat_of[name], dims=_renamed(variable.dims, dim))
                ops.append(Op("repeat_heads", (name,), repeat_of[name]))
        inputs = tuple(repeat_of.get(name, name) for name in op.inputs) if op.kind in READERS else op.inputs
        ops.append(replace(op, inputs=inputs))
    return tuple(ops)
