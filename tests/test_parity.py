"""The grid of docs/models.md: every family against transformers on every mesh, and in odd shapes."""

import pytest

from tests import parity
from tests.nn.families import CONFIGS
from tests.parity_table import SHOWN

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
LARGEST = 1e-5  # float32, of the largest entry
LARGEST_STEP = 1e-4
"""Of weights: AdamW divides each gradient by its size, and so makes the rounding of gradients near zero large."""

QUICK = ("olmo2", "data 2, fsdp 2, tensor 2", "")
CASES = [(case, mesh, "") for case in CONFIGS for mesh in parity.BASE]
CASES += [(case, mesh, shape) for case in CONFIGS for shape, mesh in parity.shapes_of(case).items()]


@pytest.mark.parametrize(
    ("case", "mesh", "shape"),
    [pytest.param(*one, marks=[] if one == QUICK else pytest.mark.slow) for one in CASES],
)
def test_a_family_is_what_transformers_makes_of_it(case, mesh, shape):
    found = parity.run(case, mesh, shape)
    assert not found.refused
    assert max(found.losses, found.logits or 0.0) < LARGEST
    assert found.weights < LARGEST_STEP
    assert found.is_written_back is not False
    assert found.is_same_text is not False


def test_every_family_is_in_the_table():
    assert set(SHOWN) <= set(CONFIGS)
    assert {parity.model_of(case).family for case in SHOWN} == set(parity.FAMILIES)
