"""A cluster: chips of one kind and how they are wired, from a short string or a TOML file, and the slices on offer.

Sources of the shapes of slices: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023);
How to Scale Your Model, section 2.2.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import check_figures
from meshwright.core.toml_file import TomlFile, decode_toml, read_toml
from meshwright.core.units import format_bit_rate, parse_rate
from meshwright.spec.chip import Chip, catalogued, chip, read_chip
from meshwright.spec.cluster_shapes import (
    LEVEL_NAMES,
    MAX_CHIPS,
    ClusterShape,
    can_twist,
    complete_shape,
    is_offered,
    times,
    torus_wraps,
)

Topology = Literal["torus", "switched", "host"]


CHIP_NAME = r"[A-Za-z][\w.-]*|[^*]+\.toml"
"""Pattern of a chip's name in the catalogue, or of a file with a chip."""
_TEXT = re.compile(rf"(?:(\d{{1,18}})\*)?({CHIP_NAME}):(\d{{1,18}}(?:x\d{{1,18}})*)(_twisted)?", re.ASCII)
_OPEN_SHAPE = re.compile(rf"({CHIP_NAME}):(\d+)chips")
"""Pattern of a chip and a number of chips; `parse_clusters` lists the shapes with that number."""
_EXAMPLES = "v5p:16x20x28, v5e:4x4, 4*v5e:16x16, v4p:4x4x8_twisted, h100:8x256 (domain x nodes) or cpu:8"
_ISLAND_EXAMPLE = "4*h100:8x32@1Gbit/s, 4 islands that each reach the others at 1 Gbit/s"


class NetworkLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one level of a switched cluster; None takes the chip's own.

    ``bytes_per_s`` is per chip and direction, with all chips using the level at once; it is divided by
    ``oversubscription`` (7 where links upwards have a seventh of the bandwidth of links downwards).
    """

    name: str
    bytes_per_s: float | None = None
    hop_s: float | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        check_figures(self, f"level {self.name!r}:" if self.name else "the level's", may_be_zero=("hop_s",))


class _SizedLevel(NetworkLevel, frozen=True, kw_only=True):
    """A level in a cluster file; a level without a name gets the name at its position in `LEVEL_NAMES`."""

    name: str = ""
    size: int


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    chip: str | dict[str, Any]
    num_islands: int = 1
    island_bytes_per_s: float | None = None
    num_slices: int = 1
    twisted: bool = False


class _ShapeFile(_ClusterFile, frozen=True, kw_only=True):
    shape: tuple[int, ...]


class _LevelsFile(_ClusterFile, frozen=True, kw_only=True):
    levels: tuple[_SizedLevel, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``num_slices`` equal slices of ``shape`` chips.

    ``shape`` is the torus (one number per axis), (domain, nodes, then sizes of further levels) of a switched cluster,
    or (devices,) of a host. ``levels`` are the figures of a switched cluster's levels, innermost first, where they
    differ from the chip's; a ``twisted`` torus has short axes that wrap around to the middle of the long ones.

    With ``num_islands`` > 1 there are that many such clusters, which are joined only through their hosts: all hosts of
    an island together send ``island_bytes_per_s``, its uplink, and receive as much at the same time.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1
    twisted: bool = False
    levels: tuple[NetworkLevel, ...] = ()
    num_islands: int = 1
    island_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Raises InputError for impossible sizes, such as those of an edited plan file."""
        rate = self.island_bytes_per_s
        if self.num_islands != 1 or rate is not None:
            if self.num_islands < 2 or rate is None or not 0 < rate < math.inf:
                message = f"num_islands={self.num_islands} with island_bytes_per_s={rate}"
                raise InputError(f"{message}: give several islands and their rate, as in {_ISLAND_EXAMPLE}.")
            if self.num_chips > MAX_CHIPS:
                raise InputError(f"{self.short_name} has more than {MAX_CHIPS:,} chips. Give a smaller cluster.")
        if not self.shape or min(*self.shape, self.num_slices) < 1:
            raise InputError(
                f"cluster of {self.num_slices} slices of {times(self.shape) or 'no'} {self.chip.name}: every size "
                "must be at least 1."
            )
        if self.twisted and not can_twist(self.chip, self.shape):
            raise InputError(
                f"{self.short_name}: this torus cannot be twisted. The shapes are k x k x 2k and k x 2k x 2k of "
                f"TPU v4 and v5p, k a multiple of 4, such as v4p:4x4x8_twisted."
            )
        if self.levels and (self.kind != "switched" or len(self.levels) != len(self.shape)):
            raise InputError(
                f"{self.short_name} has {len(self.levels)} levels for {len(self.shape)} sizes. Give one for each "
                f"size of a switched cluster, or none."
            )

    @property
    def kind(self) -> Topology:
        """How the chips are wired: "torus", "switched" or "host"."""
        return self.chip.topology

    @property
    def num_chips(self) -> int:
        return self.num_islands * self.num_slices * math.prod(self.shape)

    @property
    def island(self) -> "Cluster":
        """One of the islands: the cluster with ``num_islands`` 1, whose chips are all connected."""
        if self.num_islands == 1:
            return self
        return msgspec.structs.replace(self, num_islands=1, island_bytes_per_s=None)

    @property
    def num_hosts(self) -> int:
        """CPU hosts: for each slice or domain its chips over the chips per host, rounded up; 1 for a "host" cluster.

        If the chips per host are not known, a switched domain counts as one host.
        """
        if self.num_islands > 1:
            return self.num_islands * self.island.num_hosts
        if self.kind == "host":
            return self.num_slices
        chips_per_host = self.chip.chips_per_host or self.shape[0]
        if self.kind == "switched":
            return self.nodes * -(-self.shape[0] // chips_per_host)
        return self.num_slices * -(-math.prod(self.shape) // chips_per_host)

    @property
    def domain(self) -> int:
        """Chips that share one switch (NVLink domain). Raises InputError if the cluster is not switched."""
        if self.kind != "switched":
            raise InputError(f"{self.short_name} is a {self.kind}, it has no switched domain.")
        return self.shape[0]

    @property
    def nodes(self) -> int:
        """Number of switched domains in the cluster, over all levels of the network."""
        return math.prod(self.shape) // self.domain

    @property
    def level_names(self) -> tuple[str, ...]:
        """Unit that each size of a switched cluster counts: ``("domain", "nodes")``, then racks, pods, clusters."""
        return tuple(level.name for level in self.levels) or LEVEL_NAMES[: len(self.shape)]

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Per torus axis, True if a link closes it into a ring.

        Two-axis chips wrap only on an axis as long as the pod's (16 on a v5e). Three-axis chips wrap through optical
        switches, which join whole cubes of 4x4x4, if all axes are multiples of 4. Source: How to Scale Your Model,
        section 2.2.
        """
        return torus_wraps(self.chip, self.shape)

    @property
    def short_name(self) -> str:
        """``"4*v5e:16x16"``; for a chip of the catalogue ``parse_cluster`` reads it back."""
        if self.island_bytes_per_s is not None:
            return f"{self.num_islands}*{self.island.short_name}@{format_bit_rate(self.island_bytes_per_s)}"
        slices_text = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices_text}{self.chip.name}:{times(self.shape)}{'_twisted' if self.twisted else ''}"

    def part(self, shape: tuple[int, ...], *, num_slices: int = 1) -> "Cluster":
        """Returns a part of this cluster, with its levels; only the whole of a twisted torus is twisted."""
        full_shape = make_cluster(self.chip, shape, num_slices=num_slices).shape
        padded_shape = full_shape + (1,) * (len(self.levels) - len(full_shape))
        return msgspec.structs.replace(
            self.island, shape=padded_shape, num_slices=num_slices, twisted=self.twisted and padded_shape == self.shape
        )


def parse_cluster(text: str) -> Cluster:
    """Returns the cluster of a text such as "v5p:16x20x28", "4*v5e:16x16", "v4p:4x4x8_twisted" or "h100:8x2x192x8".

    The sizes of a switched cluster are its domain and nodes, or domain, nodes of a rack, racks of a pod and pods.
    "4*h100:8x32@1Gbit/s" are 4 islands, each with an uplink of that rate; before ``@`` a number counts no slices.
    A ``.toml`` file in place of the chip's name is read by `read_chip`; a text that is only a file by `read_cluster`.
    Raises InputError for any other text.
    """
    text = text.strip()
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    if "@" in text:
        return _islands(text, parse_cluster)
    match = _TEXT.fullmatch(text)
    if match is None and _OPEN_SHAPE.fullmatch(text):
        raise InputError(f"{text!r} leaves the shape open. Name one here, such as {_EXAMPLES}.")
    if match is None:
        raise InputError(f"cluster {text!r} is not chip:shape. Write for example {_EXAMPLES}, or name a .toml file.")
    slices_text, chip_name, sizes_text, twist_text = match.groups()
    if chip_name.endswith(".toml") and {"shape", "levels"} & read_toml(Path(chip_name)).data.keys():
        raise InputError(f"{text!r} has sizes, but the file has shape or [[levels]]. Name the file only: {chip_name}.")
    return make_cluster(
        chip(chip_name),
        tuple(int(size) for size in sizes_text.split("x")),
        num_slices=1 if slices_text is None else int(slices_text),
        twisted=twist_text is not None,
    )


def _islands(text: str, read: Callable[[str], Cluster]) -> Cluster:
    """Returns the cluster of ``"4*CLUSTER@RATE"``, with ``read`` for one island. Raises InputError for other text."""
    islands_text, _, rate_text = text.rpartition("@")
    count_text, star, island_text = islands_text.partition("*")
    if not star or not count_text.strip().isdecimal() or len(count_text) > 9 or int(count_text) < 2:
        raise InputError(
            f"cluster {text!r} has a link but not two or more islands before a *. Write for example {_ISLAND_EXAMPLE}."
        )
    rate = parse_rate(rate_text.strip(), what=f"cluster {text!r}: the link")
    return msgspec.structs.replace(read(island_text), num_islands=int(count_text), island_bytes_per_s=rate)


def make_cluster(
    chip: Chip,
    shape: tuple[int, ...],
    *,
    num_slices: int = 1,
    twisted: bool = False,
    levels: tuple[NetworkLevel, ...] = (),
) -> Cluster:
    """Returns a cluster, its shape completed with sizes of 1. Raises InputError for a shape that cannot be wired."""
    full_shape = complete_shape(chip, shape, num_slices)
    return Cluster(chip=chip, shape=full_shape, num_slices=num_slices, twisted=twisted, levels=levels)


def read_cluster(path: Path) -> Cluster:
    """Reads the cluster of a TOML file: ``chip`` (a name, or a table of figures), then ``shape`` or ``[[levels]]``.

    A chip table is complete, or has a ``base`` of the catalogue and the figures that differ. ``num_slices`` and
    ``twisted`` accompany a shape. Each of ``[[levels]]``, innermost first, has a ``size`` and may have a ``name``,
    ``bytes_per_s``, ``hop_s`` and ``oversubscription``. Several ``num_islands`` have ``island_bytes_per_s`` too. Raises
    InputError, with file:line, for wrong keys and for shapes that cannot be wired."""
    file = read_toml(path)
    if {"base", "peak_flops", "hbm_bytes"} & file.data.keys():
        raise InputError(f"{path} is a chip. Write the sizes of a cluster behind it: {path}:8x4.")
    if {"levels", "shape"} <= file.data.keys():
        raise file.error(("shape",), "the file has both shape and [[levels]]. Leave out one of them.")
    table: _LevelsFile | _ShapeFile
    levels: tuple[NetworkLevel, ...] = ()
    if "levels" in file.data:
        table = decode_toml(file, _LevelsFile)
        shape, levels = _sized_levels(file, table.levels)
    else:
        table = decode_toml(file, _ShapeFile)
        shape = table.shape
    its_chip = read_chip(path)
    with file.at(("levels" if levels else "shape",)):
        island = make_cluster(its_chip, shape, num_slices=table.num_slices, twisted=table.twisted, levels=levels)
    with file.at(("num_islands",)):
        rate = table.island_bytes_per_s
        return msgspec.structs.replace(island, num_islands=table.num_islands, island_bytes_per_s=rate)


def _sized_levels(file: TomlFile, tables: tuple[_SizedLevel, ...]) -> tuple[tuple[int, ...], tuple[NetworkLevel, ...]]:
    """Returns the sizes and the levels of ``[[levels]]``, innermost first."""
    if not 2 <= len(tables) <= len(LEVEL_NAMES):
        raise file.error(("levels",), f"{len(tables)} levels. Give 2 to {len(LEVEL_NAMES)}, the domain first.")
    levels = []
    for level, name in zip(tables, LEVEL_NAMES, strict=False):
        figure_by_name = {field: getattr(level, field) for field in NetworkLevel.__struct_fields__}
        levels.append(NetworkLevel(**{**figure_by_name, "name": level.name or name}))
    return tuple(level.size for level in tables), tuple(levels)


# -- slices on offer ------------------------------------------------------------------------------------


def parse_clusters(text: str) -> tuple[Cluster, ...]:
    """Returns every cluster of ``"v5p:4096chips"``, highest bisection first; else the one cluster of the text."""
    if "@" in text and _OPEN_SHAPE.fullmatch(text.rpartition("@")[0].partition("*")[2].strip()):
        shapes = parse_clusters(text.rpartition("@")[0].partition("*")[2])
        return tuple(_islands(text, lambda _, shape=shape: shape) for shape in shapes)  # type: ignore[misc]
    match = _OPEN_SHAPE.fullmatch(text.strip())
    if match is None:
        return (parse_cluster(text),)
    return slice_shapes(chip(match.group(1)), int(match.group(2)))


def slice_shapes(chip: Chip, num_chips: int) -> tuple[Cluster, ...]:
    """Returns every cluster of ``num_chips``, highest bisection first.

    Chips joined by optical switches form any torus of whole 4x4x4 cubes, also twisted where the shape allows, or a box
    inside one cube. Two-axis chips form a rectangle in a pod. If a pod has fewer chips, several equal slices are
    joined, as few as possible. Switched chips form whole domains. Raises CannotRunError if no shape has that number,
    InputError if the number is below 1."""
    if num_chips < 1:
        raise InputError(f"{chip.name}:{num_chips}chips has no chips. Give a number of at least 1.")
    if chip.topology == "host":
        return (make_cluster(chip, (num_chips,)),)
    if chip.topology == "switched":
        domain_chips = math.gcd(num_chips, chip.domain_chips or num_chips)
        return (make_cluster(chip, (domain_chips, num_chips // domain_chips)),)
    min_slices = -(-num_chips // (chip.max_chips or num_chips))
    # several slices only where a pod is too small, as few as possible
    max_slices = 1 if min_slices == 1 or chip.dcn_bytes_per_s is None else num_chips
    for num_slices in (count for count in range(min(min_slices, max_slices), max_slices + 1) if num_chips % count == 0):
        all_shapes = _tori(chip, num_chips // num_slices)
        shapes = [shape for shape in all_shapes if is_offered(chip, shape)] or all_shapes
        clusters = [make_cluster(chip, shape, num_slices=num_slices) for shape in shapes]
        if clusters:
            twist_shapes = [cluster.shape for cluster in clusters if can_twist(chip, cluster.shape)]
            twist_tori = [make_cluster(chip, shape, num_slices=num_slices, twisted=True) for shape in twist_shapes]
            # shorter axes first among equals; a twisted torus follows its plain one
            return tuple(
                sorted([*clusters, *twist_tori], key=lambda c: (-bisection_links(c), sum(c.shape), c.shape, c.twisted))
            )
    raise CannotRunError(f"no slices of {chip.name} have {num_chips:,} chips. {_nearest_counts(chip, num_chips)}")


def slice_note(cluster: Cluster) -> list[str]:
    """Returns [] if slices of the cluster's shape are on offer, else a line, which says if libtpu cannot compile."""
    if is_offered(cluster.chip, cluster.shape):
        return []
    slices_text = ", ".join(catalogued(cluster.chip, "libtpu").slices) + ", cubes of 4x4x4" * (len(cluster.shape) == 3)
    tail = "" if compiles(cluster.shape) else ", and no program can be compiled for it: libtpu takes hosts of 2x2 chips"
    return [f"{cluster.short_name} is not a slice that is offered ({slices_text}){tail}"]


def compiles(shape: ClusterShape) -> bool:
    """True if libtpu compiles for a shape: two axes, one chip, or an even first and second axis (hosts of 2x2)."""
    return len(shape) == 2 or math.prod(shape) == 1 or all(size % 2 == 0 for size in shape[:2])


def bisection_links(cluster: Cluster) -> int:
    """Returns the number of links between the halves of a slice's longest axis, which bounds an AllToAll. No twists."""
    longest_axis = max(range(len(cluster.shape)), key=lambda axis: cluster.shape[axis])
    num_rings = math.prod(cluster.shape) // cluster.shape[longest_axis]
    return num_rings * (1 + cluster.wraps[longest_axis])


def _tori(chip: Chip, num_chips: int) -> list[ClusterShape]:
    """Returns the shapes of one slice of ``num_chips``, sizes ascending; [] if a pod has fewer chips."""
    num_axes = chip.num_ici_axes or 1
    side = chip.wrap_multiple if num_axes == 3 else None
    if chip.max_chips is not None and num_chips > chip.max_chips:
        return []
    if side is not None and num_chips % side**3 == 0:
        return [tuple(side * n for n in box) for box in _boxes(num_chips // side**3, num_axes)]
    limit = side or max(chip.pod_shape, default=num_chips)
    return [box for box in _boxes(num_chips, num_axes) if box[-1] <= limit and all(n.bit_count() == 1 for n in box)]


def _boxes(volume: int, num_axes: int, min_size: int = 1) -> list[ClusterShape]:
    """Returns the factorings of ``volume`` into ``num_axes`` ascending sizes, none below ``min_size``."""
    if num_axes == 1:
        return [(volume,)] if volume >= min_size else []
    max_size = round(volume ** (1 / num_axes)) + 1
    return [
        (first_size, *other_sizes)
        for first_size in range(min_size, max_size + 1)
        if volume % first_size == 0
        for other_sizes in _boxes(volume // first_size, num_axes - 1, first_size)
    ]


def _nearest_counts(chip: Chip, num_chips: int) -> str:
    """Returns a sentence with the nearest numbers of chips that have a shape."""
    cube = (chip.wrap_multiple or 1) ** 3 if chip.num_ici_axes == 3 else 0
    if cube and num_chips > cube:
        fewer_chips = num_chips // cube * cube
        return f"Slices are whole cubes of {cube}: take {fewer_chips:,} or {fewer_chips + cube:,}."
    fewer_chips = 1 << (num_chips.bit_length() - 1)
    return f"Slices below a {'cube' if cube else 'pod'} are powers of two: take {fewer_chips:,} or {2 * fewer_chips:,}."
