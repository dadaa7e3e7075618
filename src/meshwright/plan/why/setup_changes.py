"""What can be different of a setting, by a factor: its chips, its links, how many chips, how much work a step."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.units import format_bytes, format_flops, format_params
from meshwright.cost.setting import Setting
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster, NetworkLevel, make_cluster

_FACTOR = re.compile(r"(\d+(?:\.\d+)?|\d*\.\d+)x")
MAX_FACTOR = 1000.0


def parse_what_if(text: str) -> dict[str, float]:
    """Quantity -> factor of ``"chip.flops=8x,network=0.1x"``; InputError for an unknown one or another value."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sep, value = (piece.strip() for piece in part.partition("="))
        if name not in CHANGES:
            raise InputError(f"--what-if {part.strip()!r}: {name!r} cannot be changed.{nearest(name, CHANGES)}")
        match = _FACTOR.fullmatch(value) if sep else None
        factor = float(match.group(1)) if match else 0.0
        if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
            raise InputError(
                f"--what-if {part.strip()!r} is not a factor from 0.001x to 1000x. Write for example {name}=2x."
            )
        if name in found:
            raise InputError(f"--what-if {text!r} changes {name} twice. Leave one out.")
        found[name] = factor
    return found


def changed_setting(setting: Setting, factors: Mapping[str, float]) -> tuple[Setting, tuple[str, ...]]:
    """The setting with every factor applied, and each change in words, from what to what."""
    words = []
    for name, factor in factors.items():
        setting, said = CHANGES[name](setting, factor)
        words.append(f"{name} {factor:g}x: {said}")
    return setting, tuple(words)


# -- chips ------------------------------------------------------------------------------------------------


def _chip_flops(setting: Setting, factor: float) -> tuple[Setting, str]:
    """Matrix products, attention and vector work."""
    chip, rates = setting.cluster.chip, setting.calibration
    faster = {
        "peak_flops": {dtype: rate * factor for dtype, rate in chip.peak_flops.items()},
        "vector_flops": _times(chip.vector_flops, factor),
    }
    if rates is not None:
        products = {dtype: rate * factor for dtype, rate in rates.matmul_flops_per_s.items()}
        attention = {dtype: rate * factor for dtype, rate in rates.attention_flops_per_s.items()}
        rates = msgspec.structs.replace(rates, matmul_flops_per_s=products, attention_flops_per_s=attention)
    known = chip.peak_flops or (setting.calibration.matmul_flops_per_s if setting.calibration else {})
    dtype = next((name for name in ("bf16", "fp16", "fp32") if name in known), next(iter(known), ""))
    words = f"{format_flops(known[dtype])} -> {format_flops(known[dtype] * factor)} in {dtype}" if dtype else "FLOP/s"
    return _with_chip(setting, rates, faster), words


def _chip_hbm(setting: Setting, factor: float) -> tuple[Setting, str]:
    chip, rates = setting.cluster.chip, setting.calibration
    if rates is not None:
        rates = msgspec.structs.replace(rates, memory_bytes_per_s=_times(rates.memory_bytes_per_s, factor))
    words = _from_to(chip.hbm_bytes_per_s, factor, lambda rate: f"{format_bytes(rate)}/s", "memory rate")
    return _with_chip(setting, rates, {"hbm_bytes_per_s": _times(chip.hbm_bytes_per_s, factor)}), words


def _chip_memory(setting: Setting, factor: float) -> tuple[Setting, str]:
    chip, rates = setting.cluster.chip, setting.calibration
    if rates is not None:
        rates = msgspec.structs.replace(rates, memory_bytes=_times(rates.memory_bytes, factor))
    sizes = {name: _times(getattr(chip, name), factor) for name in ("hbm_bytes", "usable_hbm_bytes")}
    return _with_chip(setting, rates, sizes), _from_to(chip.memory_bytes, factor, format_bytes, "memory")


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _from_to(value: float | None, factor: float, show: Callable[[float], str], what: str) -> str:
    return what if value is None else f"{show(value)} -> {show(value * factor)}"


def _with_chip(setting: Setting, calibration: Calibration | None, figures: Mapping[str, Any]) -> Setting:
    chip = msgspec.structs.replace(setting.cluster.chip, **figures)
    return msgspec.structs.replace(
        setting, cluster=msgspec.structs.replace(setting.cluster, chip=chip), calibration=calibration
    )


# -- links ------------------------------------------------------------------------------------------------

LINKS: dict[str, tuple[str, str]] = {
    "ici": ("ici_link_bytes_per_s", "torus"),
    "nvlink": ("nvlink_bytes_per_s", "switched"),
    "nic": ("nic_bytes_per_s", "switched"),
    "dcn": ("dcn_bytes_per_s_per_host", "torus"),
}
"""Level -> (the chip's figure, the kind of cluster that has it); nic is every level beyond the domain."""


def _links(*levels: str) -> Callable[[Setting, float], tuple[Setting, str]]:
    """A change of some levels' rates; those that a cluster lacks must not be all of them."""

    def change(setting: Setting, factor: float) -> tuple[Setting, str]:
        cluster, rates = setting.cluster, setting.calibration
        if cluster.kind == "host" and len(levels) > 1 and rates is not None:
            faster = tuple(msgspec.structs.replace(r, bytes_per_s=r.bytes_per_s * factor) for r in rates.collectives)
            return msgspec.structs.replace(setting, calibration=msgspec.structs.replace(rates, collectives=faster)), (
                "the rates of every collective"
            )
        here = [level for level in levels if _has(cluster, level)]
        if not here:
            have = [level for level in LINKS if _has(cluster, level)]
            raise InputError(
                f"{cluster.short_name} has no {' or '.join(levels)}. "
                + (f"Change {' or '.join(have)}." if have else "It has one chip.")
            )
        figures = {LINKS[level][0]: _times(getattr(cluster.chip, LINKS[level][0]), factor) for level in here}
        words = ", ".join(
            f"{level} {_from_to(getattr(cluster.chip, LINKS[level][0]), factor, _rate, 'rate')}" for level in here
        )
        setting = _with_chip(setting, rates, figures)
        levelled = _scaled_levels(cluster, here, factor)
        return msgspec.structs.replace(
            setting, cluster=msgspec.structs.replace(setting.cluster, levels=levelled)
        ), words

    return change


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _has(cluster: Cluster, level: str) -> bool:
    """Whether a cluster's chips use links of a level."""
    figure, kind = LINKS[level]
    if cluster.kind != kind or getattr(cluster.chip, figure) is None:
        return False
    beyond = {"nic": cluster.kind == "switched" and cluster.nodes > 1, "dcn": cluster.num_slices > 1}
    return beyond.get(level, True)


def _scaled_levels(cluster: Cluster, here: Sequence[str], factor: float) -> tuple[NetworkLevel, ...]:
    """Figures of levels that a file gives in place of the chip's."""
    names = ["nvlink" if number == 0 else "nic" for number in range(len(cluster.levels))]
    return tuple(
        msgspec.structs.replace(level, bytes_per_s=_times(level.bytes_per_s, factor)) if name in here else level
        for name, level in zip(names, cluster.levels, strict=True)
    )


# -- how many chips, how much work --------------------------------------------------------------------------


def _chips(setting: Setting, factor: float) -> tuple[Setting, str]:
    cluster = scaled_cluster(setting.cluster, factor)
    words = (
        f"{setting.cluster.short_name} -> {cluster.short_name}, {setting.cluster.num_chips:,} -> {cluster.num_chips:,}"
    )
    return msgspec.structs.replace(setting, cluster=cluster), words


def scaled_cluster(cluster: Cluster, factor: float) -> Cluster:
    """A cluster of so many times the chips, as like it as can be.

    A torus gets a longer axis: the one that keeps most rings closed and the shape most even; where no pod is that
    large, more slices. A switched cluster gets more of its outermost level, a host more devices. InputError where
    there is no such cluster.
    """
    ratio = Fraction(factor).limit_denominator(64)
    if abs(float(ratio) - factor) > 1e-6 * factor:
        raise InputError(f"chips={factor:g}x is not a simple ratio. Use for example 2x, 0.5x or 1.5x.")
    found = cluster
    for prime in _primes(ratio.numerator):
        found = _larger(found, prime)
    for prime in _primes(ratio.denominator):
        found = _smaller(found, prime)
    return found


def _primes(number: int) -> Iterable[int]:
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


def _larger(cluster: Cluster, prime: int) -> Cluster:
    numbers = range(len(cluster.shape)) if cluster.kind != "switched" else (len(cluster.shape) - 1,)
    options = [_resized(cluster, _scaled_at(cluster.shape, n, Fraction(prime))) for n in numbers]
    found = [one for one in options if one is not None]
    if not found and cluster.kind == "torus":
        more = _resized(cluster, cluster.shape, num_slices=cluster.num_slices * prime)
        found = [] if more is None else [more]
    if not found:
        raise InputError(f"there is no cluster like {cluster.short_name} of {prime} times the chips. Name one instead.")
    return min(found, key=_evenness)


def _smaller(cluster: Cluster, prime: int) -> Cluster:
    if cluster.num_slices % prime == 0:
        fewer = _resized(cluster, cluster.shape, num_slices=cluster.num_slices // prime)
        if fewer is not None:
            return fewer
    order = reversed(range(len(cluster.shape))) if cluster.kind == "switched" else range(len(cluster.shape))
    whole = [n for n in order if cluster.shape[n] % prime == 0]
    options = [_resized(cluster, _scaled_at(cluster.shape, n, Fraction(1, prime))) for n in whole]
    found = [one for one in options if one is not None]
    if not found:
        raise InputError(f"{cluster.short_name} cannot be divided by {prime}. Name a smaller cluster instead.")
    return found[0] if cluster.kind == "switched" else min(found, key=_evenness)


def _scaled_at(shape: tuple[int, ...], number: int, factor: Fraction) -> tuple[int, ...]:
    return tuple(int(size * factor) if at == number else size for at, size in enumerate(shape))


def _resized(cluster: Cluster, shape: tuple[int, ...], *, num_slices: int | None = None) -> Cluster | None:
    """The cluster with another shape and the figures of its levels; None where its chips cannot be wired so."""
    try:
        made = make_cluster(cluster.chip, shape, num_slices=num_slices or cluster.num_slices, levels=cluster.levels)
    except (InputError, CannotRunError):
        return None
    return msgspec.structs.replace(made, twisted=cluster.twisted and shape == cluster.shape)


def _evenness(cluster: Cluster) -> tuple[int, int, tuple[int, ...]]:
    """Fewer open axes first, then the shorter longest axis."""
    wraps = sum(cluster.wraps) if cluster.kind == "torus" else 0
    return -wraps, max(cluster.shape), cluster.shape


def _batch(setting: Setting, factor: float) -> tuple[Setting, str]:
    before = setting.job.batch_seqs
    after = _whole(before * factor, f"batch={factor:g}x of {before:,} sequences")
    words = f"{before:,} -> {after:,} sequences a step, {format_params(after * setting.job.seq_len)} tokens"
    return msgspec.structs.replace(setting, job=msgspec.structs.replace(setting.job, batch_seqs=after)), words


def _seq(setting: Setting, factor: float) -> tuple[Setting, str]:
    before = setting.job.seq_len
    after = _whole(before * factor, f"seq={factor:g}x of {before:,} tokens")
    tokens = format_params(after * setting.job.batch_seqs)
    words = f"{before:,} -> {after:,} tokens a sequence, as many sequences a step: {tokens} tokens"
    return msgspec.structs.replace(setting, job=msgspec.structs.replace(setting.job, seq_len=after)), words


def _whole(value: float, what: str) -> int:
    if value < 1 or abs(value - round(value)) > 1e-6 * value:
        raise InputError(f"--what-if {what} is {value:g}, not a whole number. Use a factor that divides it.")
    return round(value)


CHANGES: dict[str, Callable[[Setting, float], tuple[Setting, str]]] = {
    "chip.flops": _chip_flops,
    "chip.hbm": _chip_hbm,
    "chip.memory": _chip_memory,
    "network": _links(*LINKS),
    **{level: _links(level) for level in LINKS},
    "chips": _chips,
    "batch": _batch,
    "seq": _seq,
}
"""Quantity -> what multiplies it, with words for from what to what."""
