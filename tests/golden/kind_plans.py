"""Golden kind ``plans``: the prediction of one strategy of a job on a cluster, every field of it.

A line of ``cases/plans.txt`` is a name, a model, a cluster, sequences x tokens, mesh axes, choices and rates.
"""

from typing import Any

from tests.golden import product
from tests.golden.cases_file import Case, each, table
from tests.golden.environment import FOLDER
from tests.golden.files import Golden
from tests.golden.kind_steps import named_model


def make() -> Golden:
    """Every case."""
    return each("plans.txt", price)


def price(case: Case) -> dict[str, Any]:
    """The prediction, or the words in which it is refused."""
    model, cluster, job, axes, choices, rates = case.parts
    batch_seqs, seq_len = (int(number) for number in job.split("x"))
    found = product.priced(
        named_model(model),
        cluster,
        batch_seqs=batch_seqs,
        seq_len=seq_len,
        strategy=product.make_strategy(table(axes), table(choices)),
        rates=str(FOLDER / "fixtures" / rates) if rates.endswith(".toml") else rates,
    )
    return {"case": " | ".join(case.parts), **found}
