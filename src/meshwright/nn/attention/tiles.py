"""What a kernel needs to know of a mask and a score rule: functions of one tile of scores, the arrays that these read,
and the lists of blocks that exist."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Tile(NamedTuple):
    """Operands of one tile of scores, queries x keys, of one sequence and head.

    ``query`` and ``key`` are the indices of its rows and columns. All arrays broadcast against the tile: a value of a
    row is [bq, 1] or [bq, bk], of a column [1, bk] or [bq, bk], of a head a scalar or [bq, bk].
    """

    query: Int[Array, "..."]
    key: Int[Array, "..."]
    heads: tuple[Array, ...] = ()
    rows: tuple[Array, ...] = ()
    columns: tuple[Array, ...] = ()


class TileRule(NamedTuple):
    """A mask and a score rule as functions of a tile.

    Whatever they look up in captured arrays by sequence and head, and by query or key, is looked up before: ``heads``
    are [B | 1, N | 1], ``rows`` [B | 1, N | 1, T], ``columns`` [B | 1, N | 1, S], of any dtype but booleans. ``score``
    maps scaled scores (float32) to scores; both functions are elementwise and free of gathers. None: all keys are
    seen, scores stay.
    """

    heads: tuple[Array, ...] = ()
    rows: tuple[Array, ...] = ()
    columns: tuple[Array, ...] = ()
    mask: Callable[[Tile], Array] | None = None
    score: Callable[[Float[Array, "bq bk"], Tile], Array] | None = None


class BlockLists(NamedTuple):
    """For each block of rows (queries, or keys in a backward pass) the blocks of columns that exist.

    The first ``partial`` of ``index`` are those whose mask has to be evaluated, the next ones up to ``total`` are seen
    whole; both parts are in rising order, what follows is undefined. Leading dims are 1, or B and N.
    """

    partial: Int[Array, "B|1 N|1 rows"]
    total: Int[Array, "B|1 N|1 rows"]
    index: Int[Array, "B|1 N|1 rows columns"]
