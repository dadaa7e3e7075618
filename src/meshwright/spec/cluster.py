"""A cluster: chips of one kind and how they are wired, from a short string or a TOML file."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.chip import Chip, chip, chip_from_table
from meshwright.spec.toml_file import TomlFile, read_toml

Topology = Literal["torus", "switched", "host"]

_TEXT = re.compile(r"(?:(\d+)\*)?([A-Za-z][\w.-]*):(\d+(?:x\d+)*)")
_EXAMPLES = "v5p:16x20x28, v5e:4x4, 4*v5e:16x16, h100:8x256 (domain x nodes) or cpu:8"


MAX_HOST_DEVICES = 64
"""Emulated devices of one machine; each costs threads and memory."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``num_slices`` equal slices of ``shape`` chips.

    ``shape`` is the torus (one number per axis), (domain, nodes) of a switched cluster, or (devices,) of a host.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no cluster has, such as those of an edited plan file."""
        if not self.shape or min(*self.shape, self.num_slices) < 1:
            raise InputError(
                f"cluster of {self.num_slices} slices of {_times(self.shape)} {self.chip.name}: every size must be "
                f"at least 1."
            )

    @property
    def kind(self) -> Topology:
        """How the chips are wired: "torus", "switched" or "host"."""
        return self.chip.topology

    @property
    def num_chips(self) -> int:
        return self.num_slices * math.prod(self.shape)

    @property
    def num_hosts(self) -> int:
        """CPU hosts: the chips of a slice over the chips per host, rounded up; one for a "host" cluster.

        Where the chips per host are not known a switched domain counts as one host.
        """
        if self.kind == "host":
            return self.num_slices
        per_host = self.chip.chips_per_host or self.shape[0]
        if self.kind == "switched":
            return self.num_slices * self.shape[1] * -(-self.shape[0] // per_host)
        return self.num_slices * -(-math.prod(self.shape) // per_host)

    @property
    def domain(self) -> int:
        """Chips that share one switch (NVLink domain)."""
        if self.kind != "switched":
            raise InputError(f"{self.short_name} is a {self.kind}, it has no switched domain.")
        return self.shape[0]

    @property
    def nodes(self) -> int:
        """Switched domains joined by the network."""
        if self.kind != "switched":
            raise InputError(f"{self.short_name} is a {self.kind}, it has no switched domain.")
        return self.shape[1]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Per torus axis: does a link close it into a ring?

        Two-axis chips wrap on an axis of 16 only. Three-axis chips wrap through optical switches, which join
        whole cubes of 4x4x4: all axes must be multiples of 4. Source: How to Scale Your Model, section 2.2.
        """
        return torus_wraps(self.chip, self.shape)

    @property
    def short_name(self) -> str:
        """``"4*v5e:16x16"``; for a chip of the catalogue ``parse_cluster`` reads it back."""
        slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices}{self.chip.name}:{'x'.join(map(str, self.shape))}"


def torus_wraps(chip: Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Per axis, whether a slice of this shape has wraparound links. See ``Cluster.wraps``."""
    if chip.topology != "torus" or chip.wrap_multiple is None:
        return (False,) * len(shape)
    full = [size > 1 and size % chip.wrap_multiple == 0 for size in shape]
    if chip.num_ici_axes == 3 and not all(full):
        return (False,) * len(shape)
    return tuple(full)


def parse_cluster(text: str) -> Cluster:
    """The cluster of ``"v5p:16x20x28"``, ``"v5e:4x4"``, ``"4*v5e:16x16"``, ``"h100:8x256"``, ``"cpu:8"`` or a file.

    Anything that ends in ``.toml`` is read as a file. Raises InputError in one line otherwise.
    """
    text = text.strip()
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"cluster {text!r} is not chip:shape. Write for example {_EXAMPLES}, or name a .toml file.")
    slices, name, sizes = match.groups()
    found = chip(name)
    return make_cluster(
        found, tuple(int(size) for size in sizes.split("x")), num_slices=1 if slices is None else int(slices)
    )


def make_cluster(chip: Chip, shape: tuple[int, ...], *, num_slices: int = 1) -> Cluster:
    """A checked cluster: axes completed with 1, sizes positive and inside what the chip can be wired to."""
    if min(shape, default=0) < 1 or num_slices < 1:
        raise InputError(f"cluster {chip.name}:{_times(shape)} has a size below 1. Give positive whole numbers.")
    checks = {"torus": _torus_shape, "switched": _switched_shape, "host": _host_shape}
    return Cluster(chip=chip, shape=checks[chip.topology](chip, shape, num_slices), num_slices=num_slices)


def read_cluster(path: Path) -> Cluster:
    """The cluster of a TOML file: ``chip`` (a name, or a table of figures), ``shape``, ``num_slices``.

    A chip table is complete or has a ``base`` of the catalogue and only what differs.
    """
    file = read_toml(path)
    file.check_keys(("chip", "shape", "num_slices"), required=("chip", "shape"))
    named = file.data["chip"]
    if isinstance(named, str):
        found = _at_line(file, ("chip",), lambda: chip(named))
    elif isinstance(named, dict):
        file.check_keys((*Chip.__struct_fields__, "base"), at=("chip",))
        found = _at_line(file, ("chip",), lambda: chip_from_table(named))
    else:
        raise file.error(("chip",), "chip is a name in quotes or a table [chip] of figures.")
    try:
        shape = msgspec.convert(file.data["shape"], tuple[int, ...])
        num_slices = msgspec.convert(file.data.get("num_slices", 1), int)
    except msgspec.ValidationError as error:
        raise file.error(("shape",), f"shape is a list of whole numbers, num_slices one: {error}.") from None
    return _at_line(file, ("shape",), lambda: make_cluster(found, shape, num_slices=num_slices))


def _at_line(file: TomlFile, key: tuple[str, ...], make: Any) -> Any:
    try:
        return make()
    except InputError as error:
        raise file.error(key, str(error)) from None


def _torus_shape(chip: Chip, shape: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    axes = chip.num_ici_axes or len(shape)
    given = f"{chip.name}:{_times(shape)}"
    if len(shape) > axes:
        raise InputError(
            f"{given} has {len(shape)} torus axes and {chip.name} has {axes}. {_advice(chip, shape, axes)}"
        )
    if len(shape) == 1 and shape[0] > 1 and axes > 1:
        raise InputError(f"{given} names one of the {axes} torus axes of {chip.name}. {_advice(chip, shape, axes)}")
    if axes == 2 and any(size > limit for size, limit in zip(shape, chip.pod_shape, strict=False)):
        raise InputError(
            f"{given} is larger than a pod of {chip.name}, {_times(chip.pod_shape)}."
            f" Join slices over the data-centre network: {_slices_advice(chip, shape)}."
        )
    if chip.max_chips is not None and math.prod(shape) > chip.max_chips:
        pod = f" ({_times(chip.pod_shape)})" if chip.pod_shape else ""
        raise InputError(
            f"{given} has {math.prod(shape)} chips and a pod of {chip.name} {chip.max_chips}{pod}."
            f" Name a smaller slice, or several: 2*{chip.name}:16x16x16."
        )
    if num_slices > 1 and chip.dcn_bytes_per_s is None:
        raise CannotRunError(f"{chip.name} has no known data-centre network between slices. Use one slice.")
    return shape + (1,) * (axes - len(shape))


def _switched_shape(chip: Chip, shape: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    given = f"{chip.name}:{_times(shape)}"
    if num_slices > 1:
        raise InputError(f"{num_slices}*{given}: slices are for TPUs. Write domain x nodes: {chip.name}:8x256.")
    if len(shape) > 2:
        raise InputError(f"{given} has {len(shape)} sizes. Write domain x nodes, such as {chip.name}:8x256.")
    domain, nodes = shape if len(shape) == 2 else (shape[0], 1)
    limit = chip.domain_chips
    if limit is not None and domain > limit:
        whole = -(-domain * nodes // limit)
        raise InputError(
            f"{given} asks for {domain} chips in one domain and {chip.name} joins {limit}."
            f" Write domain x nodes: {chip.name}:{limit}x{whole}."
        )
    return domain, nodes


def _host_shape(chip: Chip, shape: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    if len(shape) != 1 or num_slices != 1:
        raise InputError(f"{chip.name}:{_times(shape)}: this machine is a number of devices, such as {chip.name}:8.")
    if shape[0] > MAX_HOST_DEVICES:
        raise InputError(
            f"{chip.name}:{shape[0]} asks for {shape[0]} emulated devices on one machine; "
            f"at most {MAX_HOST_DEVICES} run. Use {chip.name}:8."
        )
    return shape


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _advice(chip: Chip, shape: tuple[int, ...], axes: int) -> str:
    return f"{math.prod(shape)} chips are for example {chip.name}:{_times(balanced_shape(math.prod(shape), axes))}."


def _slices_advice(chip: Chip, shape: tuple[int, ...]) -> str:
    pod = math.prod(chip.pod_shape)
    return f"{-(-math.prod(shape) // pod)}*{chip.name}:{_times(chip.pod_shape)}"


def balanced_shape(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """The factors of ``num_chips`` over the axes that are closest to equal, smallest first."""
    if num_axes == 1:
        return (num_chips,)
    first = max(size for size in range(1, round(num_chips ** (1 / num_axes)) + 1) if num_chips % size == 0)
    return (first, *balanced_shape(num_chips // first, num_axes - 1))
