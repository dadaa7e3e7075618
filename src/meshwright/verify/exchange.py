"""Sums between islands, which hosts run outside the compiled program: arrays, sizes and bytes by formula."""

import msgspec

from meshwright.cost.outer import sent_bytes, step_values
from meshwright.cost.setting import Setting
from meshwright.spec.strategy import Strategy
from meshwright.verify.traffic import TrafficComparison


class OuterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sum between islands: its array, when it runs, values per island, and bytes that leave an island."""

    array: str
    when: str
    num_values: float
    sent_bytes: float


class ExchangeProof(msgspec.Struct, frozen=True, kw_only=True):
    """The exchange of ``num_islands`` equal islands, each with ``num_devices``, in a period of ``period`` steps.

    ``leaving`` are the compiled collectives, as "kind over axes", over axes that an island's mesh lacks (there should
    be none); None if nothing was compiled.
    """

    num_islands: int
    num_devices: int
    period: int
    rows: tuple[OuterRow, ...]
    leaving: tuple[str, ...] | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave an island in a period; as many enter it."""
        return sum(row.sent_bytes for row in self.rows)


def exchange_proof(setting: Setting, strategy: Strategy, traffic: TrafficComparison | None) -> ExchangeProof:
    """Returns the exchange of a strategy with islands; ``traffic`` is of one island's compiled program."""
    inner = strategy.inner()
    sizes = setting.of_island(strategy).sizes(inner)
    rows = tuple(
        OuterRow(
            array=str(step.inputs[0]),
            when=step.details.words,
            num_values=step_values(step, sizes),
            sent_bytes=sent_bytes(step, strategy, sizes),
        )
        for step in setting.derived(strategy).outer
    )
    leaving = None
    if traffic is not None:
        outside_rows = (row for row in traffic.rows if row.compiled_arrays and not {*row.axes} <= inner.mesh.keys())
        leaving = tuple(f"{row.kind} over {','.join(row.axes)}" for row in outside_rows)
    return ExchangeProof(
        num_islands=strategy.num_islands,
        num_devices=inner.num_chips,
        period=strategy.outer_every,
        rows=rows,
        leaving=leaving,
    )
