"""Seconds and bytes of the sums between islands, which the hosts compute: copies, the link, work in host memory."""

import msgspec
from msgspec.structs import replace

from meshwright.algebra.derived import Derived
from meshwright.algebra.notation import local_elements, product
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES, ISLANDS
from meshwright.core.units import format_rate
from meshwright.spec.cluster import Cluster
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy

PCIE_BYTES_PER_S = 16e9
"""Assumed one-way rate between a chip and its host if the catalogue has none: PCIe gen 3 x16."""

HOST_BYTES_PER_S = 20e9
"""Bytes that a host reads and writes per second as it adds arrays: an assumption, half of what NumPy reaches on one
core (a server's Xeon, 2026)."""

CODED_PER_S, DECODED_PER_S = 0.5e9, 2.5e9
"""Numbers that a host encodes in 8 or 4 bits per second, and decodes per second: an assumption, NumPy on one core."""

SCALED_TOGETHER = 64
"""Numbers of 8 or 4 bits that share one 16-bit scale."""

HOST_STATE = {"gradients": 0, "diloco": 2, "local-sgd": 2, "async-sgd": 4}
"""Float32 arrays as large as the weights that hosts hold: outer weights and momentum; asynchronous islands also the
sent array, and sums since the last momentum."""

_WIDE = DTYPE_BYTES["fp32"]


class OuterExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The sums between islands in one period of ``period`` steps, in the steady state.

    ``link_bytes`` leave an island in a period (as many enter it): each of R islands sends (R - 1) / R of all numbers as
    partial sums, and as many of its finished sums to the other islands. ``copy_s`` are from chips to hosts and back,
    ``host_s`` adding, coding and the outer optimizer. ``hidden_s`` overlap with steps; the rest is exposed.
    """

    num_islands: int
    period: int
    num_values: float
    link_bytes: float
    copy_s: float
    link_s: float
    host_s: float
    hidden_s: float
    num_arrays: int
    assumed: str = ""

    @property
    def host_bytes(self) -> float:
        """Bytes of the ``num_arrays`` float32 arrays of all weights that the hosts of an island hold."""
        return self.num_arrays * _WIDE * self.num_values

    @property
    def serial_s(self) -> float:
        """Mean seconds per step if nothing overlaps."""
        return (self.copy_s + self.link_s + self.host_s) / self.period

    @property
    def exposed_s(self) -> float:
        """Seconds by which exchanges lengthen the mean step."""
        return self.serial_s - self.hidden_s / self.period


def outer_exchange(
    cluster: Cluster, strategy: Strategy, derived: Derived, sizes: OpSizes, *, inner_s: float
) -> OuterExchange:
    """Returns the exchange of the ``outer`` steps of a derivation; ``inner_s`` are the seconds of a step without it.

    A period moves all trained weights. Copies are never hidden. The link and the hosts may work during the
    ``outer_overlap`` steps of each fragment, at most during the whole period. Asynchronous islands wait for the link as
    long as if all sent at once.
    """
    rate, sync = cluster.island_bytes_per_s, strategy.islands_sync
    assert rate is not None, "a strategy of islands is priced on a cluster that has them"
    num_values = chip_values = 0.0
    for step in derived.outer:
        num_stages = sizes.mesh.get("pipeline", 1) if step.details.num_layers else 1
        chip_values += step_values(step, sizes) / product(sizes.mesh[axis] for axis in step.result.spread) / num_stages
        num_values += step_values(step, sizes)
    num_islands, is_coded = strategy.num_islands, strategy.outer_bits < 8 * _WIDE
    link_bytes = sum(sent_bytes(step, strategy, sizes) for step in derived.outer)
    pcie_bytes_per_s = cluster.chip.pcie_bytes_per_s or PCIE_BYTES_PER_S
    copy_s = 0.0 if cluster.kind == "host" else 2 * chip_values * _WIDE / pcie_bytes_per_s
    # adding takes two reads and a write; addends and an island's sums are encoded once each, and both decoded
    state_accesses = 2 * HOST_STATE[sync] + 2 * (HOST_STATE[sync] > 0)
    host_accesses = 3 * (1 - 1 / num_islands) + state_accesses
    coding_s = (1 + 1 / num_islands) / CODED_PER_S + 2 / DECODED_PER_S if is_coded else 0.0
    host_s = num_values / cluster.island.num_hosts * (host_accesses * _WIDE / HOST_BYTES_PER_S + coding_s)
    link_s, every = link_bytes / rate, strategy.outer_every
    overlapping = min(strategy.outer_fragments * strategy.outer_overlap, every)
    return OuterExchange(
        num_islands=num_islands,
        period=every,
        num_values=num_values,
        link_bytes=link_bytes,
        copy_s=copy_s,
        link_s=link_s,
        host_s=host_s,
        hidden_s=min(link_s + host_s, overlapping * inner_s),
        num_arrays=HOST_STATE[sync],
        assumed=_assumed(cluster, pcie_bytes_per_s, is_coded=is_coded),
    )


def step_values(step: Step, sizes: OpSizes) -> float:
    """Returns how many numbers a sum between islands has, over all chips of an island, copies not counted."""
    local_values = local_elements(step.result, sizes.dims, sizes.mesh) * (step.details.num_layers or 1)
    return float(local_values * product(sizes.mesh[axis] for axis in step.result.spread))


def sent_bytes(step: Step, strategy: Strategy, sizes: OpSizes) -> float:
    """Returns the bytes that leave an island for one sum (as many enter): 2 (R - 1) / R of its numbers, with scales."""
    value_bytes = DTYPE_BYTES[step.result.dtype]
    scale_bytes = 2 / SCALED_TOGETHER if value_bytes < _WIDE else 0.0
    sent_share = 1 - 1 / strategy.num_islands
    return 2 * sent_share * step_values(step, sizes) * (value_bytes + scale_bytes)


def with_exchange(estimate: Prediction[float], exchange: OuterExchange) -> Prediction[float]:
    """Returns the prediction for all islands: ``estimate`` of one island, with the seconds of ``exchange`` added."""
    step_s = estimate.step_s + exchange.exposed_s
    share = estimate.step_s / step_s
    is_bound = exchange.exposed_s > estimate.step_s_lower
    return replace(
        estimate,
        step_s=step_s,
        step_s_lower=max(estimate.step_s_lower, exchange.link_s / exchange.period),
        step_s_p10=estimate.step_s_p10 and estimate.step_s_p10 + exchange.exposed_s,
        step_s_p90=estimate.step_s_p90 and estimate.step_s_p90 + exchange.exposed_s,
        step_s_upper=estimate.step_s_upper + exchange.serial_s,
        mfu=estimate.mfu * share,
        hfu=estimate.hfu * share,
        mfu_causal=estimate.mfu_causal and estimate.mfu_causal * share,
        bound_by=ISLANDS if is_bound else estimate.bound_by,
        flops=estimate.flops * exchange.num_islands,
        terms={**estimate.terms, ISLANDS: exchange.serial_s},
    )


def _assumed(cluster: Cluster, pcie_bytes_per_s: float, *, is_coded: bool) -> str:
    """Returns in words what the price of an exchange assumes."""
    known_text = "" if cluster.chip.pcie_bytes_per_s else ", which is assumed"
    copy_text = f"chips and hosts exchange {format_rate(pcie_bytes_per_s)} a chip{known_text}"
    if cluster.kind == "host":
        copy_text = "islands on one machine share its cores, and each is priced as if it had them alone"
    coded_text = f" and code {CODED_PER_S / 1e9:g} billion numbers a second" * is_coded
    return f"{copy_text}; a host is assumed to add at {format_rate(HOST_BYTES_PER_S)} of memory{coded_text}"
