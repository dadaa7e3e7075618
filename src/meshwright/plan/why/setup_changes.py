"""Changes of a setting by factors: the rates of chips and links, the number of chips, the size of a step's job."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeVar

import msgspec

from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.units import counted, format_bytes, format_flops, format_params
from meshwright.cost.setting import Setting
from meshwright.spec.cluster import Cluster, make_cluster

_FACTOR = re.compile(r"(\d+(?:\.\d+)?|\d*\.\d+)x")
MAX_FACTOR = 1000.0


def parse_what_if(text: str, names: Collection[str] = ()) -> dict[str, float]:
    """Parses ``"chip.flops=8x,network=0.1x"`` to quantity -> factor. Raises InputError for a quantity that is not in
    ``names`` (default: `CHANGES`) or is given twice, and for a factor outside 0.001x to 1000x."""
    known_names = names or CHANGES
    factor_by_name: dict[str, float] = {}
    for change_text in text.split(","):
        name, separator, factor_text = (piece.strip() for piece in change_text.partition("="))
        if name not in known_names:
            hint = nearest(name, known_names)
            raise InputError(f"--what-if {change_text.strip()!r}: {name!r} cannot be changed.{hint}")
        match = _FACTOR.fullmatch(factor_text) if separator else None
        factor = float(match.group(1)) if match else 0.0
        if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
            raise InputError(
                f"--what-if {change_text.strip()!r} is not a factor from 0.001x to 1000x. Write for example {name}=2x."
            )
        if name in factor_by_name:
            raise InputError(f"--what-if {text!r} changes {name} twice. Leave one out.")
        factor_by_name[name] = factor
    return factor_by_name


def changed_setting(setting: Setting, factors: Mapping[str, float]) -> tuple[Setting, tuple[str, ...]]:
    """Returns the setting with every factor applied, and each change in words, with the values before and after."""
    change_texts = []
    for name, factor in factors.items():
        setting, change_words = CHANGES[name](setting, factor)
        change_texts.append(f"{name} {factor:g}x: {change_words}")
    return setting, tuple(change_texts)


# -- chips ------------------------------------------------------------------------------------------------

S = TypeVar("S", bound=msgspec.Struct)


def _times(value: Any, factor: float) -> Any:
    """Returns a number, or every number of a dict, multiplied by ``factor``; None for None."""
    if isinstance(value, dict):
        return {name: _times(figure, factor) for name, figure in value.items()}
    return None if value is None else value * factor


def _multiplied(figures: S, names: Iterable[str], factor: float) -> S:
    return msgspec.structs.replace(figures, **{name: _times(getattr(figures, name), factor) for name in names})


def _with_chip(setting: Setting, names: Iterable[str], factor: float, measured_names: tuple[str, ...] = ()) -> Setting:
    """Multiplies the fields ``names`` of the chip, and ``measured_names`` of the calibration, which replace them."""
    cluster, rates = setting.cluster, setting.calibration
    cluster = msgspec.structs.replace(cluster, chip=_multiplied(cluster.chip, names, factor))
    return msgspec.structs.replace(
        setting, cluster=cluster, calibration=None if rates is None else _multiplied(rates, measured_names, factor)
    )


def _chip_flops(setting: Setting, factor: float) -> tuple[Setting, str]:
    """Multiplies the rates of matrix products, attention and vector work."""
    rate_of = setting.cluster.chip.peak_flops or (setting.calibration.matmul_flops_per_s if setting.calibration else {})
    dtype = next((name for name in ("bf16", "fp16", "fp32") if name in rate_of), next(iter(rate_of), ""))
    change_words = f"{_from_to(rate_of.get(dtype), factor, format_flops, 'FLOP/s')}{f' in {dtype}' if dtype else ''}"
    measured_names = ("matmul_flops_per_s", "attention_flops_per_s")
    return _with_chip(setting, ("peak_flops", "vector_flops"), factor, measured_names), change_words


def _chip_hbm(setting: Setting, factor: float) -> tuple[Setting, str]:
    change_words = _from_to(setting.cluster.chip.hbm_bytes_per_s, factor, _rate, "memory rate")
    return _with_chip(setting, ("hbm_bytes_per_s",), factor, ("memory_bytes_per_s",)), change_words


def _slowest(setting: Setting, factor: float) -> tuple[Setting, str]:
    """Slows down one chip: collectives make every chip wait for it, so that all compute at its rates."""
    if factor > 1:
        raise InputError(f"--what-if slowest={factor:g}x would speed the slowest chip up. Give at most 1x.")
    rates = setting.rates
    measured_names = ("matmul_flops_per_s", "attention_flops_per_s", "memory_bytes_per_s")
    slower_rates = _multiplied(rates, measured_names, factor)
    shares = _multiplied(rates.efficiency, ("compute", "attention", "hbm"), factor)
    setting = msgspec.structs.replace(setting, calibration=msgspec.structs.replace(slower_rates, efficiency=shares))
    return setting, f"every chip waits for one whose compute and memory run at {factor:.0%}"


def _chip_memory(setting: Setting, factor: float) -> tuple[Setting, str]:
    change_words = _from_to(setting.cluster.chip.memory_bytes, factor, format_bytes, "memory")
    return _with_chip(setting, ("hbm_bytes", "usable_hbm_bytes"), factor, ("memory_bytes",)), change_words


def _from_to(old_value: float | None, factor: float, show: Callable[[float], str], what: str) -> str:
    return what if old_value is None else f"{show(old_value)} -> {show(old_value * factor)}"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


# -- links ------------------------------------------------------------------------------------------------

LINKS: dict[str, tuple[str, str]] = {
    "ici": ("ici_link_bytes_per_s", "torus"),
    "nvlink": ("nvlink_bytes_per_s", "switched"),
    "nic": ("nic_bytes_per_s", "switched"),
    "dcn": ("dcn_bytes_per_s_per_host", "torus"),
}
"""Level -> (the chip's field of its rate, the kind of cluster that has it); "nic" is every level beyond a domain."""
BEYOND = ("nic", "dcn")
"""Levels beyond an NVLink domain or a slice."""


def _links(*levels: str) -> Callable[[Setting, float], tuple[Setting, str]]:
    """Returns a function that changes the rates of ``levels``; it raises InputError if a cluster has none of them."""

    def change(setting: Setting, factor: float) -> tuple[Setting, str]:
        cluster, rates = setting.cluster, setting.calibration
        if cluster.kind == "host" and len(levels) > 1 and rates is not None:
            faster_rates = tuple(_multiplied(rate, ("bytes_per_s",), factor) for rate in rates.collectives)
            rates = msgspec.structs.replace(rates, collectives=faster_rates)
            return msgspec.structs.replace(setting, calibration=rates), "the rates of every collective"
        present = [level for level in levels if _has(cluster, level)]
        if not present:
            own_levels = [level for level in LINKS if _has(cluster, level)]
            group_noun = "domain" if cluster.kind == "switched" else "slice"
            raise InputError(
                f"{cluster.short_name} has no {' or '.join(levels)}"
                + (f": nothing leaves its {group_noun}. " if levels == BEYOND else ". ")
                + (f"Change {' or '.join(own_levels)}." if own_levels else "It has one chip.")
            )
        change_words = ", ".join(
            f"{level} {_from_to(getattr(cluster.chip, LINKS[level][0]), factor, _rate, 'rate')}" for level in present
        )
        setting = _with_chip(setting, [LINKS[level][0] for level in present], factor)
        # rates of levels in a cluster file replace the chip's rates
        changed_levels = tuple(
            _multiplied(level, ("bytes_per_s",), factor) if ("nic" if level_index else "nvlink") in present else level
            for level_index, level in enumerate(cluster.levels)
        )
        cluster = msgspec.structs.replace(setting.cluster, levels=changed_levels)
        return msgspec.structs.replace(setting, cluster=cluster), change_words

    return change


def _has(cluster: Cluster, level: str) -> bool:
    """True if a cluster's chips use links of a level."""
    figure_name, cluster_kind = LINKS[level]
    if cluster.kind != cluster_kind or getattr(cluster.chip, figure_name) is None:
        return False
    has_by_level = {"nic": cluster.kind == "switched" and cluster.nodes > 1, "dcn": cluster.num_slices > 1}
    return has_by_level.get(level, True)


# -- how many chips, how much work --------------------------------------------------------------------------


def _chips(setting: Setting, factor: float) -> tuple[Setting, str]:
    old_cluster, cluster = setting.cluster, scaled_cluster(setting.cluster, factor)
    chips_text = f"{old_cluster.num_chips:,} -> {counted(cluster.num_chips, 'chip')}"
    change_words = f"{old_cluster.short_name} -> {cluster.short_name}, {chips_text}"
    return msgspec.structs.replace(setting, cluster=cluster), change_words


def scaled_cluster(cluster: Cluster, factor: float) -> Cluster:
    """Returns a similar cluster with ``factor`` times the chips.

    A torus gets a longer axis, the one that keeps most rings closed and the shape most even, or more slices if no pod
    is that large; for fewer chips it loses slices first, if they divide. A switched cluster changes its outermost
    level, a host its devices; of several islands each changes. Raises InputError if there is no such cluster.
    """
    if cluster.num_islands > 1:
        rates = {name: getattr(cluster, name) for name in ("num_islands", "island_bytes_per_s")}
        return msgspec.structs.replace(scaled_cluster(cluster.island, factor), **rates)
    ratio = Fraction(factor).limit_denominator(64)
    if abs(float(ratio) - factor) > 1e-6 * factor:
        raise InputError(f"chips={factor:g}x is not a simple ratio. Use for example 2x, 0.5x or 1.5x.")
    changes = [(_larger, prime) for prime in _primes(ratio.numerator)]
    changes += [(_smaller, prime) for prime in _primes(ratio.denominator)]
    new_cluster = cluster
    for change, prime in changes:
        clusters = change(new_cluster, prime)
        if not clusters:
            raise InputError(f"no cluster like {cluster.short_name} has {factor:g} times its chips. Give another.")
        # with more closed axes, then with a shorter longest axis
        new_cluster = min(clusters, key=lambda c: (c.kind == "torus" and -sum(c.wraps), max(c.shape), c.shape))
    return new_cluster


def _primes(remainder: int) -> Iterable[int]:
    divisor = 2
    while remainder > 1:
        while remainder % divisor == 0:
            yield divisor
            remainder //= divisor
        divisor += 1


def _larger(cluster: Cluster, prime: int) -> list[Cluster]:
    last_axis = len(cluster.shape) - 1
    axis_indices = range(last_axis if cluster.kind == "switched" else 0, last_axis + 1)
    clusters = _resized_at(cluster, axis_indices, Fraction(prime))
    if not clusters and cluster.kind == "torus":
        clusters = _resized(cluster, cluster.shape, num_slices=cluster.num_slices * prime)
    return clusters


def _smaller(cluster: Cluster, prime: int) -> list[Cluster]:
    clusters = []
    if cluster.num_slices % prime == 0:
        clusters = _resized(cluster, cluster.shape, num_slices=cluster.num_slices // prime)
    axis_ids = [axis_id for axis_id, size in enumerate(cluster.shape) if size % prime == 0]
    if not clusters:
        clusters = _resized_at(cluster, axis_ids[-1:] if cluster.kind == "switched" else axis_ids, Fraction(1, prime))
    return clusters


def _resized_at(cluster: Cluster, axis_indices: Iterable[int], factor: Fraction) -> list[Cluster]:
    """Returns each cluster that has one of the axes ``axis_indices`` multiplied by ``factor``."""
    shapes = (
        tuple(int(size * factor) if index == axis_index else size for index, size in enumerate(cluster.shape))
        for axis_index in axis_indices
    )
    return [new_cluster for shape in shapes for new_cluster in _resized(cluster, shape)]


def _resized(cluster: Cluster, shape: tuple[int, ...], *, num_slices: int | None = None) -> list[Cluster]:
    """Returns the cluster with another shape and the same figures of levels; [] if its chips have no such shape."""
    try:
        resized = make_cluster(cluster.chip, shape, num_slices=num_slices or cluster.num_slices, levels=cluster.levels)
    except (InputError, CannotRunError):
        return []
    return [msgspec.structs.replace(resized, twisted=cluster.twisted and shape == cluster.shape)]


def _job_size(field: str, name: str, noun: str, words: str) -> Callable[[Setting, float], tuple[Setting, str]]:
    """Returns a function that multiplies a field of the job; it raises InputError if that gives no whole number."""

    def change(setting: Setting, factor: float) -> tuple[Setting, str]:
        old_size = getattr(setting.job, field)
        exact_size = old_size * factor
        new_size = round(exact_size)
        if exact_size < 1 or abs(exact_size - new_size) > 1e-6 * exact_size:
            raise InputError(
                f"--what-if {name}={factor:g}x of {old_size:,} {noun} is {exact_size:g}, not a positive whole number. "
                f"Use a factor that gives one."
            )
        job = msgspec.structs.replace(setting.job, **{field: new_size})
        tokens = format_params(job.batch_seqs * job.seq_len)
        return msgspec.structs.replace(setting, job=job), f"{old_size:,} -> {new_size:,} {words.format(tokens=tokens)}"

    return change


CHANGES: dict[str, Callable[[Setting, float], tuple[Setting, str]]] = {
    "chip.flops": _chip_flops,
    "chip.hbm": _chip_hbm,
    "chip.memory": _chip_memory,
    "slowest": _slowest,
    "network": _links(*BEYOND),
    "links": _links(*LINKS),
    **{level: _links(level) for level in LINKS},
    "chips": _chips,
    "batch": _job_size("batch_seqs", "batch", "sequences", "sequences a step, {tokens} tokens"),
    "seq": _job_size("seq_len", "seq", "tokens", "tokens a sequence, as many sequences a step: {tokens} tokens"),
}
"""Quantity -> function (setting, factor) that multiplies it; returns the new setting and words for both values."""
JOB_CHANGES = ("batch", "seq")
"""Quantities of a training job, which a service does not have."""
