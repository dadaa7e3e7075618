"""Which positions of a sequence a device has."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.attention.order import SequenceOrder, zigzag_order


def test_a_zigzag_deals_out_the_two_ends():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sorted(zigzag_order(24, 4)) == list(range(24))
    with pytest.raises(InputError, match=r"the length is 12. Use a multiple of 8"):
        zigzag_order(12, 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_zigzag_gives_every_rank_the_same_work(num_ranks):
    length = 16 * num_ranks
    seen = zigzag_order(length, num_ranks).reshape(num_ranks, -1) + 1
    work = seen.sum(axis=1)
    assert np.all(work == work[0])
    in_order = (np.arange(length).reshape(num_ranks, -1) + 1).sum(axis=1)
    assert in_order.max() / in_order.mean() > 1.4


def test_rows_are_put_back_in_order():
    rows = np.arange(24).reshape(1, 24)
    assert SequenceOrder().restored(rows) is rows
    dealt = rows[:, zigzag_order(24, 3)]
    assert SequenceOrder(3).restored(dealt).tolist() == rows.tolist()
    assert SequenceOrder(3).index((), 24).tolist() == zigzag_order(24, 3).tolist()
    assert SequenceOrder().index((), 24) is None
