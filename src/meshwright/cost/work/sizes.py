"""Slots of experts that a model's tokens fill, and those that a compiled program holds besides."""

from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.sizes import Number
from meshwright.spec.model import Model


def spare_slots(model: Model, *, imbalance: Number = 1.0) -> float:
    """Slots of an expert for each that is filled on average in a compiled program, whose arrays have fixed sizes.

    Without a bound every expert has one for every token: E / Ea times those that are filled. With one, which
    ``imbalance`` above 1 stands for, there are as many as are counted already.
    """
    unbounded = model.num_experts > 0 and imbalance == 1.0
    return model.num_experts / model.experts_per_token if unbounded else 1.0


def expert_slots(model: Model, *, num_tokens: Number, imbalance: Number = 1.0) -> dict[str, Number]:
    """The dim C, slots of one expert for the tokens of a microbatch on all devices, and Er, rows of the router's
    counts; nothing for a dense model.

    tokens x experts per token / experts, times the load of the busiest expert device over the mean: a step waits
    for that device, so each is counted with its load.
    """
    if not model.num_experts:
        return {}
    slots = num_tokens * model.experts_per_token / model.num_experts * imbalance
    return {"C": slots, "Er": len(ROUTING_ROWS)}
