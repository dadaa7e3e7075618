"""Worked answers on training Llama 3 70B: FLOPs, days, chips, and where mixed sharding stays compute-bound."""

from meshwright.cost.formulas import limits, training_budget
from meshwright.spec.chip import chip, known, peak
from tests.oracles.worked import Answers, Inputs

V5P = chip("v5p-book")


def seconds(i: Inputs) -> float:
    """Seconds of the row's FLOPs on v5p chips; one chip at full utilisation where the row says nothing else."""
    return training_budget.train_seconds(
        i["flops"], num_chips=i.get("chips", 1), peak_flops=peak(V5P, "bf16"), mfu=i.get("mfu", 1.0)
    )


def run_days(i: Inputs) -> float:
    """The same in days."""
    return training_budget.days(seconds(i))


def roots(i: Inputs) -> limits.Roots:
    """The FSDP sizes between which the row's mixed sharding is compute-bound."""
    return limits.Mixture(i["B"], i["F"], i["N"], i["alpha"], i["M_X"], i["M_Y"]).roots


ANSWERS: Answers = {
    "book-5.1.2-llama-chips": lambda i: limits.fsdp_max_chips(i["batch"], i["alpha"], i["axes"]),
    "book-5.1.2-llama-days": run_days,
    "book-5.1.2-llama-flops": lambda i: training_budget.training_flops(i["params"], i["tokens"]),
    "book-5.1.6-10pods": run_days,
    "book-5.1.6-10pods-peak": run_days,
    "book-6.2-1752": lambda i: training_budget.rescaled_days(
        i["days"], chips_from=i["chips_from"], chips_to=i["chips_to"]
    ),
    "book-6.2-days": run_days,
    "book-6.2-flops-token": lambda i: training_budget.training_flops(i["params"], 1),
    "book-6.2-minchips": lambda i: training_budget.min_chips(i["bytes"], known(V5P, "hbm_bytes")),
    "book-6.2-seconds": seconds,
    "book-6.2-years": lambda i: training_budget.years(seconds(i)),
    "book-6.3-X": lambda i: roots(i).upper,
    "book-6.3-X1": lambda i: limits.fsdp_roots_middle(i["B"], i["alpha"], fsdp_axes=2),
    "book-6.3-mixed": lambda i: limits.mixed_min_tokens_per_chip(
        i["alpha"], i["F"], fsdp_axes=i["MxMy"], tensor_axes=1
    ),
    "s000-llama-chips": lambda i: limits.fsdp_max_chips(i["batch"], i["alpha"], i["axes"]),
}
