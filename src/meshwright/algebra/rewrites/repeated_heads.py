"""Repeats key and value heads whose number ``tensor`` does not divide, so that every device has the heads that its
queries read. The weights of keys and values are then whole over ``tensor``."""

import math

from msgspec.structs import replace

from meshwright.algebra.program import Block, Op, Program, Variable
from meshwright.spec.strategy import GENERATION_RULES, REPEATED_HEADS, Strategy

READERS = ("attention", "cache_write")
"""Ops whose inputs of keys and values are repeated."""
KV_HEADS = {"K", "Kf"}
"""Dims of kv heads, which are repeated as Kt and Kft, or Kct and Kfct."""


def repeated_dim(strategy: Strategy) -> str:
    """Returns the dim of repeated kv heads: Kct where ulysses splits heads over ``context`` too, else Kt."""
    return "Kct" if strategy.context_attention == "ulysses" else "Kt"


def with_repeated_heads(strategy: Strategy) -> Strategy:
    """Returns the strategy with its rules for K moved to the repeated heads (`repeated_dim`); no axis splits K then."""
    new_dim, old_rules = repeated_dim(strategy), GENERATION_RULES | strategy.assignment
    new_rules = {
        role: {new_dim if dim == "K" else dim: axes for dim, axes in rules.items()} for role, rules in old_rules.items()
    }
    return replace(strategy, assignment=new_rules)


def strategy_of_heads(strategy: Strategy, num_kv_heads: int) -> Strategy:
    """Returns the strategy with repeated kv heads if the devices that split heads do not divide ``num_kv_heads``, else
    the strategy unchanged. Layers with several numbers of kv heads: pass their greatest common divisor."""
    num_devices = math.prod(strategy.mesh.get(axis, 1) for axis in REPEATED_HEADS[repeated_dim(strategy)])
    is_standard = strategy.rules("activation").get("K") == ("tensor",)
    return with_repeated_heads(strategy) if is_standard and num_kv_heads % num_devices else strategy


def repeating(program: Program, strategy: Strategy) -> Program:
    """Returns the program; with a rule for repeated heads, kv heads are repeated before attention and in caches."""
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
    """Returns a block's ops with a ``repeat_heads`` op for each kv array before the first reader; adds their results to
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
