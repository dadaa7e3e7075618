"""The candidates of a search as arrays: meshes, batches and microbatches whose sizes divide; parts of a cluster."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derive import Derived, derive
from meshwright.algebra.notation import product
from meshwright.algebra.transformer import transformer
from meshwright.core.dims import MESH_AXES
from meshwright.cost.memory import total_bytes, training_memory
from meshwright.cost.ops import OpSizes
from meshwright.cost.step_costs import op_sizes
from meshwright.cost.step_rates import attention_scores
from meshwright.plan.legal import Facts, Rule, Split, divisors, legal_axis_sizes, mask, size_rules, splits
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster, make_cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import REMAT_POLICIES, Strategy

Rows = np.ndarray
"""Whole numbers, one row per candidate: data, fsdp, context, tensor, sequences of the batch."""

Remat = str | tuple[str, ...]


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched: everything but the mesh, the placement, microbatches and remat that are left open.

    ``derived`` holds the symbolic steps of every remat policy that may be chosen. ``fixed`` are mesh axes whose size
    is given; ``num_microbatches`` is None for any number that divides. ``template`` carries the other choices.
    """

    model: Model
    seq_len: int
    template: Strategy
    derived: dict[Remat, Derived]
    rules: tuple[Rule, ...]
    splits: tuple[Split, ...]
    num_microbatches: int | None = None
    fixed: dict[str, int] = {}
    calibration: Calibration | None = None

    def dims(self, batch_seqs: Any) -> dict[str, Any]:
        """Sizes of all dims, B of the whole batch."""
        return self.model.dims | {"B": batch_seqs, "T": self.seq_len}


def open_space(
    model: Model,
    seq_len: int,
    template: Strategy,
    *,
    remats: Sequence[Remat] = REMAT_POLICIES,
    num_microbatches: int | None = None,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Space:
    """The space around a strategy's other choices, with its steps derived once per remat policy."""
    program = transformer(model)
    changed = {remat: msgspec.structs.replace(template, remat=remat) for remat in remats}
    derived = {remat: derive(program, strategy, symbolic=True) for remat, strategy in changed.items()}
    one = next(iter(derived.values()))
    return Space(
        model=model,
        seq_len=seq_len,
        template=template,
        derived=derived,
        rules=size_rules(one),
        splits=splits(one),
        num_microbatches=num_microbatches,
        fixed=dict(fixed or {}),
        calibration=calibration,
    )


def rows_on_chips(space: Space, batch_seqs: int, *, num_chips: int, reach: float = 0.0) -> Rows:
    """Every mesh of exactly so many chips whose sizes divide, for the batch.

    With ``reach``, a share of the batch, each mesh comes with the nearest batches below and above that it divides
    and that are no further away.
    """
    axes = [(space.fixed[axis],) if axis in space.fixed else None for axis in MESH_AXES]
    meshes = np.array(list(_factorings(num_chips, axes)), dtype=np.int64).reshape(-1, len(axes))
    rows = _with_batch(meshes, batch_seqs)
    if reach:
        shards = meshes[:, 0] * meshes[:, 1] * (space.num_microbatches or 1)
        near = [_with_batch(meshes, shards * (batch_seqs // shards + above)) for above in (0, 1)]
        rows = np.concatenate(near)
        rows = rows[(rows[:, 4] > 0) & (np.abs(rows[:, 4] - batch_seqs) <= reach * batch_seqs)]
    return rows[np.broadcast_to(mask(space.rules, _row_facts(space, rows, num_chips)), len(rows))]


def rows_on_any_chips(space: Space, batch_seqs: int) -> Rows:
    """Every mesh whose sizes divide the work, of any number of chips."""
    sizes = [
        (space.fixed[axis],) if axis in space.fixed else legal_axis_sizes(space.splits, axis, space.dims(batch_seqs))
        for axis in MESH_AXES
    ]
    rows = _with_batch(np.array(list(itertools.product(*sizes)), dtype=np.int64), batch_seqs)
    sized = [rule for rule in space.rules if rule.name != "devices"]
    return rows[np.broadcast_to(mask(sized, _row_facts(space, rows, 0)), len(rows))]


def _factorings(number: int, axes: Sequence[tuple[int, ...] | None]) -> Iterable[tuple[int, ...]]:
    """All ways to write a number as an ordered product, some factors given."""
    options = axes[0] or divisors(number)
    if len(axes) == 1:
        if number in options:
            yield (number,)
        return
    for first in options:
        if number % first == 0:
            for rest in _factorings(number // first, axes[1:]):
                yield (first, *rest)


def _with_batch(meshes: np.ndarray, batch_seqs: int | np.ndarray) -> Rows:
    return np.column_stack([meshes, np.broadcast_to(np.asarray(batch_seqs, dtype=np.int64), len(meshes))])


def _mesh(rows: Rows) -> dict[str, np.ndarray]:
    return {axis: rows[:, number] for number, axis in enumerate(MESH_AXES)}


def _row_facts(space: Space, rows: Rows, num_chips: int) -> Facts:
    return Facts(
        model=space.model.name,
        cluster="",
        num_chips=num_chips,
        mesh=_mesh(rows),
        dims=space.dims(rows[:, 4]),
        num_microbatches=space.num_microbatches or 1,
        state=space.template.state,
    )


def with_microbatches(space: Space, rows: Rows) -> tuple[Rows, np.ndarray]:
    """Every row with each number of microbatches that leaves whole sequences to every data shard."""
    if space.num_microbatches is not None:
        return rows, np.full(len(rows), space.num_microbatches, dtype=np.int64)
    local = rows[:, 4] // (rows[:, 0] * rows[:, 1])
    local_seqs = local.tolist()
    choices = {size: divisors(size) for size in set(local_seqs)}
    repeats = [len(choices[size]) for size in local_seqs]
    counts = [count for size in local_seqs for count in choices[size]]
    return np.repeat(rows, repeats, axis=0), np.array(counts, dtype=np.int64)


def candidate_sizes(space: Space, cluster: Cluster, rows: Rows, counts: np.ndarray) -> OpSizes:
    return op_sizes(
        space.model,
        seq_len=space.seq_len,
        microbatch_seqs=rows[:, 4] / counts,
        mesh={axis: sizes.astype(float) for axis, sizes in _mesh(rows).items()},
        state=space.template.state,
        scores=attention_scores(cluster),
    )


def parts_of(cluster: Cluster, num_chips: int) -> tuple[Cluster, ...]:
    """Clusters of exactly that many chips inside a cluster: sub-tori, fewer nodes, fewer slices.

    Fewer slices first, then those with more closed rings, then the more compact ones.
    """
    found = []
    for num_slices in range(1, cluster.num_slices + 1):
        for shape in _boxes(cluster.shape, num_chips / num_slices):
            part = make_cluster(cluster.chip, shape, num_slices=num_slices)
            found.append((num_slices, -sum(part.wraps), max(shape), shape, part))
    return tuple(part for *_, part in sorted(found, key=lambda one: one[:4]))


def _boxes(shape: Sequence[int], volume: float) -> list[tuple[int, ...]]:
    """Shapes of that volume that fit inside a shape."""
    if volume != int(volume):
        return []
    if not shape:
        return [()] if volume == 1 else []
    return [
        (size, *rest)
        for size in divisors(int(volume))
        if size <= shape[0]
        for rest in _boxes(shape[1:], volume // size)
    ]


def memory_of_any_mesh(space: Space, cluster: Cluster, batch: int) -> Mapping[int, float]:
    """Number of chips -> the least memory per chip of any legal strategy on so many chips."""
    rows = rows_on_any_chips(space, batch)
    rows, counts = with_microbatches(space, rows)
    sizes = candidate_sizes(space, cluster, rows, counts)
    needs = [total_bytes(training_memory(steps, sizes, num_microbatches=counts)) for steps in space.derived.values()]
    need = np.min([np.broadcast_to(one, len(rows)) for one in needs], axis=0)
    chips: Any = product(_mesh(rows).values())
    return {count: float(need[chips == count].min()) for count in sorted(set(chips.tolist()))}
