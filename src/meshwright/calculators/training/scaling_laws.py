"""Loss from size and data, and how to spend a compute budget: published scaling laws by name.

Every law is a fit to one corpus and tokenizer: losses of different laws are not comparable with each other, and
only differences within one law say anything. N are parameters, D tokens, C = 6 N D FLOPs.
"""

import math
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.core.errors import InputError, require_known
from meshwright.cost.formulas.training_budget import Number, petaflop_days, training_flops

TOKENS_PER_PARAM = 20
"""The rule of thumb that Hoffmann et al. (2022) is known by: Chinchilla's 1.4e12 tokens on 70e9 parameters."""

LARGEST_BUDGET = 1e40
"""FLOPs up to which `flops_for_loss` searches, far above any machine."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters and tokens whose 6 N D is the budget, and the loss that they give."""

    num_params: float
    num_tokens: float
    loss: float
    tokens_per_param: float


class ScalingLaw(msgspec.Struct, frozen=True, kw_only=True):
    """L = E + A / N^alpha + B / D^beta (``form`` "sum"), or Kaplan's L = ((A / N)^(alpha/beta) + B / D)^beta ("joint").

    ``params_counted`` says which N it means. L is in nats per token of the corpus that it fits.
    """

    name: str
    source: str
    form: Literal["sum", "joint"]
    floor: float
    params_scale: float
    params_exponent: float
    tokens_scale: float
    tokens_exponent: float
    params_counted: Literal["all", "without embeddings"] = "all"

    def loss(self, num_params: Number, num_tokens: Number) -> Number:
        """Returns the loss in nats per token; sizes may be NumPy arrays."""
        if self.form == "sum":
            params_term = self.params_scale / num_params**self.params_exponent
            return self.floor + params_term + self.tokens_scale / num_tokens**self.tokens_exponent
        params_term = (self.params_scale / num_params) ** (self.params_exponent / self.tokens_exponent)
        return (params_term + self.tokens_scale / num_tokens) ** self.tokens_exponent

    def optimum(self, flops: float) -> Allocation:
        """Returns the N and D of least loss with 6 N D = C.

        "sum": N = G (C/6)^(beta/(alpha+beta)), G = (alpha A / (beta B))^(1/(alpha+beta)), Hoffmann et al. equation 4.
        "joint": Kaplan's own fit of early-stopped runs, N = 1.3e9 C^0.73 with C in petaflop-days, equation 1.7; the
        loss formula describes converged runs, and its minimum is elsewhere.
        """
        if flops <= 0:
            raise InputError(f"a budget of {flops:g} FLOPs trains nothing. Give for example 1e24.")
        if self.form == "joint":
            num_params = KAPLAN_PARAMS * petaflop_days(flops) ** KAPLAN_EXPONENT
        else:
            exponent_sum = self.params_exponent + self.tokens_exponent
            term_balance = self.params_exponent * self.params_scale / (self.tokens_exponent * self.tokens_scale)
            num_params = term_balance ** (1 / exponent_sum) * (flops / 6) ** (self.tokens_exponent / exponent_sum)
        return self.spend(flops, num_params)

    def spend(self, flops: float, num_params: float) -> Allocation:
        """Returns the allocation that spends all of a budget on a model of ``num_params``."""
        return self.allocation(num_params, flops / training_flops(num_params, 1))

    def allocation(self, num_params: float, num_tokens: float) -> Allocation:
        """Returns these parameters and tokens with the loss that they reach."""
        loss = float(self.loss(num_params, num_tokens))
        return Allocation(
            num_params=num_params, num_tokens=num_tokens, loss=loss, tokens_per_param=num_tokens / num_params
        )


_FILE = Path(__file__).parent / "data" / "scaling_laws.toml"
_LAWS = msgspec.convert(tomllib.loads(_FILE.read_text("utf-8"))["law"], tuple[ScalingLaw, ...])
LAWS = {law.name: law for law in _LAWS}
DEFAULT_LAW = "chinchilla"

KAPLAN_PARAMS = 1.3e9
KAPLAN_EXPONENT = 0.73
KAPLAN_BATCH_TOKENS = 2e8
KAPLAN_BATCH_EXPONENT = 0.21


def scaling_law(name: str) -> ScalingLaw:
    """Returns the law of that name. Raises InputError with the nearest name."""
    require_known("scaling law", name, LAWS)
    return LAWS[name]


def fixed_ratio(flops: float, *, law: ScalingLaw) -> Allocation:
    """Returns a budget's allocation at `TOKENS_PER_PARAM` = r tokens per parameter: N = sqrt(C / (6 r)), D = r N."""
    return law.spend(flops, math.sqrt(flops / (6 * TOKENS_PER_PARAM)))


def flops_for_loss(law: ScalingLaw, loss: float) -> float:
    """Returns the FLOPs with which the law's optimum has a given loss. Raises InputError if no budget gives it."""
    if loss <= law.floor or law.optimum(LARGEST_BUDGET).loss > loss:
        raise InputError(
            f"no budget up to {LARGEST_BUDGET:g} FLOPs reaches a loss of {loss:g} by {law.name}, whose floor is "
            f"{law.floor:g}. Give a higher loss."
        )
    if law.optimum(1.0).loss < loss:
        raise InputError(f"a loss of {loss:g} is above what {law.name} gives without training. Give a lower loss.")
    low_log, high_log = 0.0, math.log10(LARGEST_BUDGET)
    for _ in range(100):
        middle_log = (low_log + high_log) / 2
        low_log, high_log = (middle_log, high_log) if law.optimum(10**middle_log).loss > loss else (low_log, middle_log)
    return float(10**high_log)


def critical_batch_tokens(loss: Number) -> Number:
    """Returns tokens per step beyond which more sequences save few steps: 2e8 / L^(1/0.21).

    It grows as the loss falls; at this size a run takes twice the fewest steps and twice the least data. Source:
    Kaplan et al. 2020, equation 5.3 (after McCandlish et al. 2018); nats on WebText2.
    """
    return KAPLAN_BATCH_TOKENS / loss ** (1 / KAPLAN_BATCH_EXPONENT)
