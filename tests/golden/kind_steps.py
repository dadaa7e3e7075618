"""Golden kind ``steps``: what is derived for a model under a strategy, step by step, as lines of text.

A line of ``cases/steps.txt`` is a name, a model, mesh axes, choices of the strategy and options of the program. A first
choice ``pass=`` asks for generation.
"""

from typing import Any

from tests.golden import product
from tests.golden.cases_file import Case, each, table
from tests.golden.environment import ROOT
from tests.golden.files import Golden


def make() -> Golden:
    """Every case."""
    return each("steps.txt", _derived)


def named_model(name: str) -> Any:
    """A small model of ``models/`` behind a dot, else one of the catalogue."""
    return product.find_model(str(ROOT / "tests/golden/models" / f"{name[1:]}.json") if name[0] == "." else name)


def _derived(case: Case) -> dict[str, Any]:
    model, axes, choices, options = case.parts
    asked = table(choices)
    which = asked.pop("pass", "")
    words = " | ".join(case.parts)
    if which:
        cache_dtype, quantised = asked.pop("cache", "bf16"), asked.pop("quantised", False)
        strategy = product.make_strategy(table(axes), asked)
        found = product.generation_steps(
            named_model(model), strategy, which=which, cache_dtype=cache_dtype, quantised=quantised
        )
    else:
        strategy = product.make_strategy(table(axes), asked)
        found = product.training_steps(named_model(model), strategy, product.make_options(table(options)))
    return {"case": words, **found}
