"""Which layers a device stores, and the one line that says why layers do not make stages."""

import numpy as np
import pytest

from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.core.errors import CannotRunError
from meshwright.parallel.pipeline.stages import layer_pattern, layer_permutation


def made(name, stages, chunks=None):
    return build(name, stages=stages, microbatches=2 * stages, chunks=chunks or default_chunks(name))


def test_round_and_round_and_in_a_v():
    """Device 0 of two stores the first piece and, of a loop, the third; of a V, the last."""
    assert layer_permutation(made("interleaved", 2), 8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layer_permutation(made("dualpipe-v", 2), 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert layer_permutation(made("interleaved", 2, chunks=3), 6).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("name", schedule_names())
def test_one_piece_per_device_keeps_the_order(name):
    order = layer_permutation(made(name, 4), 16)
    assert sorted(order) == list(range(16))
    plain = name not in ("interleaved", "dualpipe-v")
    assert (order == np.arange(16)).all() == plain


def test_layers_of_several_kinds_take_turns_in_every_stage():
    schedule = made("1f1b", 2)
    assert layer_pattern(schedule, ("layer_local", "layer") * 4) == ("layer_local", "layer") * 2
    message = "pipeline=4 gives stages of 1 layers that differ: layer 1 is 'layer' where layer 0 is 'layer_local'"
    with pytest.raises(CannotRunError, match=message):
        layer_pattern(made("1f1b", 4), ("layer_local", "layer") * 2)
    with pytest.raises(CannotRunError, match="layer 4 is 'layer_moe' where layer 0 is 'layer'"):
        layer_pattern(schedule, ("layer",) * 4 + ("layer_moe",) * 4)


def test_layers_that_do_not_divide():
    with pytest.raises(CannotRunError, match=r"pipeline=4 with chunks=2 does not divide 12 .* in \{1, 2, 3, 6\}\.$"):
        layer_permutation(made("interleaved", 4), 12)
    with pytest.raises(CannotRunError, match=r"does not divide 3 layers .* Use fewer chunks\.$"):
        layer_permutation(made("interleaved", 4), 3)
