"""One accelerator: its peaks, memory, links and anatomy, each figure with its source."""

import datetime
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import check_figures, convert_fields, unknown_fields
from meshwright.core.toml_file import read_toml

CATALOGUE = Path(__file__).parent / "data" / "chips"

_NOT_INHERITED = ("aliases", "family", "device_kind", "libtpu", "xla_gpu")
"""Fields that a chip does not inherit from its base: for compilers and measurements it may be other hardware."""

_IN_PROGRAMS = (
    *("topology", "num_ici_axes", "twists", "vmem_bytes", "l2_bytes", "num_cores", "mxus_per_core", "mxu_dim"),
    *("vpu_lanes_per_core", "vpu_alus_per_lane", "sms_per_tpc", "num_tpcs", "num_sms", "l1_bytes_per_sm"),
    *("register_bytes_per_sm", "fp32_lanes_per_sm", "tensor_cores_per_sm", "tensor_core_flops_per_cycle"),
)
"""Fields on which compiled programs depend: a chip that differs from its base in one is not compiled as its base."""

PAID_FOR = ("price_usd_per_hour", "power_w")
"""Fields that only the book's variant of a chip inherits: other hardware has another price and another power."""

_MAY_BE_ZERO = ("ici_hop_s", "nvlink_hop_s", "network_hop_s", "dcn_hop_s", "price_usd_per_hour", "power_w")

MATMUL_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4", "int4")
"""Dtypes of matrix products, the widest first."""

_NARROW_FLOATS = {"fp8", "fp4"}

OPTIONS = Path(__file__).parent / "data" / "compiler_options.toml"
OptionValue = bool | int | str


class LibtpuTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TPU as libtpu knows it: the text of a topology is ``name``, a colon and sizes. The compiler counts a chip as
    ``devices``. Products read 16-bit numbers from tiles of ``tile_rows`` rows; memory has tiles of 8. ``slices`` are
    the shapes on offer, with three axes also whole cubes. ``note`` says what a compiled program cannot show."""

    name: str
    chip_config_name: str = ""
    devices: int = 1
    tile_rows: int = 8
    slices: tuple[str, ...] = ()
    note: str = ""


class XlaGpuTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of XLA's GpuTargetConfigProto, from which XLA compiles for a GPU that is absent."""

    description: str
    capability: str
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    device_memory_size: int
    l2_cache_size: int
    clock_rate_ghz: float
    memory_bandwidth: int
    dnn: str


class CompilerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of XLA compiler options that is recommended for some chips, with the evidence for it.

    ``exposed_gb`` maps each of these chips to the GB of exposed communication of a device in a compiled step (which
    ``compiled`` describes), without and with the options. ``effect`` says what the options do.
    """

    options: dict[str, OptionValue]
    effect: str
    exposed_gb: dict[str, tuple[float, float]]
    compiled: str
    date: datetime.date
    versions: str


class GivenOptions(msgspec.Struct, frozen=True):
    """The options that a compiler was given, and the names of recommended options that it refuses."""

    used: dict[str, OptionValue] = {}
    refused: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """A list with one line that names the refused options; [] if none was refused."""
        names_text = ", ".join(self.refused)
        return [f"the installed compiler refuses {names_text}: compiled without"] if names_text else []


class Chip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator as its data sheet gives it. ``None`` means not known, never zero.

    Peaks are dense FLOP/s. Every bandwidth is ONE way and per chip, except ``dcn_bytes_per_s_per_host``;
    ``ici_link_bytes_per_s`` is per torus axis and direction, so a ring uses twice that. The latencies
    ``*_hop_s`` other than the ICI's are round assumptions where no source is given; a calibration replaces them.
    ``family`` names the fitted numbers that apply: the chip's own, or its nearest measured relative's.
    ``device_kind`` is a pattern for the name that its devices report, in small letters and with spaces for - and _;
    ``libtpu`` or ``xla_gpu`` is what programs are compiled for. A chip inherits none of these four from its ``base``,
    the catalogue's chip that a user's chip differs from; the base's fitted numbers apply if no ``family`` is given.
    """

    name: str
    base: str = ""
    aliases: tuple[str, ...] = ()
    full_name: str = ""
    vendor: str = ""
    variant: Literal["datasheet", "book", "custom"] = "datasheet"
    topology: Literal["torus", "switched", "host"]
    family: str = ""
    device_kind: str = ""
    libtpu: LibtpuTarget | None = None
    xla_gpu: XlaGpuTarget | None = None
    peak_flops: dict[str, float] = {}
    vector_flops: float | None = None
    hbm_bytes: float | None = None
    usable_hbm_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    vmem_bytes: float | None = None
    vmem_bytes_per_s: float | None = None
    l2_bytes: float | None = None
    l2_bytes_per_s: float | None = None
    # torus links
    ici_link_bytes_per_s: float | None = None
    num_ici_axes: int | None = None
    ici_hop_s: float = 1e-6
    pod_shape: tuple[int, ...] = ()
    max_chips: int | None = None
    wrap_multiple: int | None = None
    twists: bool = False
    # switched links
    nvlink_bytes_per_s: float | None = None
    domain_chips: int | None = None
    nvlink_hop_s: float = 1e-6
    nic_bytes_per_s: float | None = None
    network_hop_s: float = 5e-6
    # hosts
    chips_per_host: int | None = None
    dcn_bytes_per_s_per_host: float | None = None
    dcn_hop_s: float = 1e-5
    pcie_bytes_per_s: float | None = None
    price_usd_per_hour: float | None = None
    power_w: float | None = None
    # anatomy
    num_cores: int | None = None
    mxus_per_core: int | None = None
    mxu_dim: int | None = None
    vpu_lanes_per_core: int | None = None
    vpu_alus_per_lane: int | None = None
    clock_hz: float | None = None
    die: str | None = None
    die_gpcs: int | None = None
    die_tpcs_per_gpc: int | None = None
    die_l2_bytes: float | None = None
    sms_per_tpc: int | None = None
    num_tpcs: int | None = None
    num_sms: int | None = None
    l1_bytes_per_sm: float | None = None
    register_bytes_per_sm: float | None = None
    fp32_lanes_per_sm: int | None = None
    tensor_cores_per_sm: int | None = None
    tensor_core_flops_per_cycle: int | None = None
    sources: dict[str, str] = {}

    def __post_init__(self) -> None:
        check_figures(self, "the chip's", may_be_zero=_MAY_BE_ZERO)
        require_dtypes(self.peak_flops, "peak_flops: ")
        try:
            re.compile(self.device_kind)
        except re.error as error:
            raise ValueError(f"device_kind {self.device_kind!r} is no regular expression: {error}") from None

    @property
    def ici_axis_bytes_per_s(self) -> float | None:
        """Bandwidth of one torus axis in both directions together: the W of the ring formulas; None if not known."""
        return None if self.ici_link_bytes_per_s is None else 2 * self.ici_link_bytes_per_s

    @property
    def dcn_bytes_per_s(self) -> float | None:
        """Bandwidth of one chip into the data-centre network: its share of the host's; None if not known."""
        if self.dcn_bytes_per_s_per_host is None or self.chips_per_host is None:
            return None
        return self.dcn_bytes_per_s_per_host / self.chips_per_host

    def priced(self, usd_per_hour: float) -> "Chip":
        """Returns the chip at another price. Raises InputError for a price that is not a number of at least 0."""
        try:
            return msgspec.structs.replace(self, price_usd_per_hour=usd_per_hour)
        except ValueError:
            raise InputError(
                f"--price {usd_per_hour:g} is no price. Give dollars per chip and hour, such as 2.5."
            ) from None

    @property
    def memory_bytes(self) -> float | None:
        """Bytes a program may allocate: the compiler's limit if known, else the data sheet's size, or None."""
        return self.usable_hbm_bytes if self.usable_hbm_bytes is not None else self.hbm_bytes


def peak(chip: Chip, dtype: str) -> float:
    """Returns dense FLOP/s of matrix products whose operands are ``dtype``.

    fp16 runs at the bf16 rate where the table has no fp16; bf16 never runs at the fp16 rate, as a V100 has fp16 and
    no bf16. Raises InputError for any other dtype that the chip lacks, and names the dtypes that it has.
    """
    flops_per_s = chip.peak_flops.get(dtype)
    if flops_per_s is None and dtype == "fp16":
        flops_per_s = chip.peak_flops.get("bf16")
    if flops_per_s is not None:
        return flops_per_s
    if not chip.peak_flops:
        raise InputError(f"{chip.name} has no known peak. Measure it, or give peak_flops in a chip's file.")
    known_dtypes, has_fp16 = ", ".join(sorted(chip.peak_flops)), dtype == "bf16" and "fp16" in chip.peak_flops
    advice = "Choose one of these" + (", in a plan by --set strategy.precision=fp16" if has_fp16 else "")
    raise InputError(f"{chip.name} has no {dtype} matrix rate in its table; it has {known_dtypes}. {advice}.")


def require_dtypes(dtypes: Iterable[str], where: str = "") -> None:
    """Raises InputError for a dtype in which no matrix product is computed; ``where`` begins the message."""
    for dtype in (name for name in dtypes if name not in MATMUL_DTYPES):
        raise InputError(f"{where}{dtype!r} is not a dtype of matrix products.{nearest(dtype, MATMUL_DTYPES)}")


def compute_dtype(chip: Chip, *operand_dtypes: str) -> str:
    """Returns the dtype in which a product is computed: the widest operand's, as in int8 weights x bf16 activations.

    A narrower dtype that the chip cannot multiply (int4, or fp8 on a v5e) is widened to bf16, or fp16 without bf16;
    integers with narrow floats are multiplied in bf16. Raises InputError for an unknown dtype.
    """
    require_dtypes(operand_dtypes)
    dtypes = set(operand_dtypes)
    widest_dtype = min(dtypes, key=MATMUL_DTYPES.index)
    if {"int8", "int4"} & dtypes and _NARROW_FLOATS & dtypes:
        widest_dtype = "bf16"
    if widest_dtype in chip.peak_flops or widest_dtype in {"fp32", "tf32", "bf16"}:
        return widest_dtype
    return "bf16" if "bf16" in chip.peak_flops else "fp16"


def known(chip: Chip, figure: str) -> float:
    """Returns the chip's field called ``figure`` as a float. Raises InputError if it is None."""
    value = getattr(chip, figure)
    if value is None:
        hint = f'Give it in a file with base = "{chip.name}", or name another chip.'
        raise InputError(f"{figure} of {chip.name} is not known. {hint}")
    return float(value)


def _merge(entry: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a chip's entry over its base's fields (recursively), without fields not inherited."""
    base_name = entry.get("base")
    if not base_name:
        return dict(entry)
    left_out_keys = _NOT_INHERITED + (() if entry.get("variant") == "book" else PAID_FOR)
    left_out_keys += ("usable_hbm_bytes",) if "hbm_bytes" in entry else ()
    fields = {key: value for key, value in _merge(entries[base_name], entries).items() if key not in left_out_keys}
    fields["peak_flops"] = fields.get("peak_flops", {}) | entry.get("peak_flops", {})
    fields["sources"] = fields.get("sources", {}) | entry.get("sources", {})
    merged_keys = ("base", "peak_flops", "sources")
    return fields | {key: value for key, value in entry.items() if key not in merged_keys}


@functools.cache
def chips() -> dict[str, Chip]:
    """Returns every chip of the catalogue by name, in the order of the files."""
    entry_by_name: dict[str, dict[str, Any]] = {}
    for path in sorted(CATALOGUE.glob("*.toml")):
        with path.open("rb") as file:
            for entry in tomllib.load(file)["chip"]:
                entry_by_name[entry["name"]] = entry
    return {name: msgspec.convert(_merge(entry, entry_by_name), Chip) for name, entry in entry_by_name.items()}


@functools.cache
def compiler_options() -> tuple[CompilerOptions, ...]:
    """Returns every set of compiler options that the project recommends."""
    return tuple(msgspec.convert(tomllib.loads(OPTIONS.read_text())["option"], list[CompilerOptions]))


def options_of(name: str) -> dict[str, OptionValue]:
    """Returns the recommended compiler options for a chip of the catalogue by its name; {} if there are none."""
    rows = (row for row in compiler_options() if name in row.exposed_gb)
    return {option: value for row in rows for option, value in row.options.items()}


def chip(name: str) -> Chip:
    """Returns the chip of that name or alias, or of a ``.toml`` file. Raises InputError with the nearest name."""
    if name.strip().endswith(".toml"):
        return read_chip(Path(name.strip()))
    chip_of_word = {word: entry for entry in chips().values() for word in (entry.name, *entry.aliases)}
    if (word := name.strip().lower()) not in chip_of_word:
        raise InputError(f"unknown chip {name!r}.{nearest(name.lower(), chip_of_word)} See: meshwright show chips.")
    return chip_of_word[word]


def chip_of_kind(device_kind: str) -> Chip:
    """Returns the chip whose pattern matches the longest part of ``device_kind``; raises InputError if none matches."""
    # "A100-SXM4-80GB": separators between the words do not matter.
    kind_text = device_kind.strip().lower().replace("-", " ").replace("_", " ")
    chips_with_kind = (entry for entry in chips().values() if entry.device_kind)
    matches = [(match[0], entry) for entry in chips_with_kind if (match := re.search(entry.device_kind, kind_text))]
    if matches:
        # "h100 pcie" is longer than "h100", which matches too
        return max(matches, key=lambda pair: len(pair[0]))[1]
    raise InputError(
        f"the devices call themselves {device_kind!r}, which is no chip of the catalogue. Name the chip that they are "
        f"like: --chip h200 (see meshwright show chips)."
    )


def catalogued(chip: Chip, field: str, *, name: str | None = None) -> Any:
    """Returns a field of a chip or, if it is empty, the field of the catalogue's chip called ``name`` (default: the
    chip's own name). Plan files of earlier versions, and tables that users write, name a chip without all of its
    fields."""
    entry = chips().get(name or chip.name)
    return getattr(chip, field) or (getattr(entry, field) if entry else None)


def catalogue_name(chip: Chip) -> str:
    """Returns the name of a chip's base, or the chip's name if it has no base."""
    # plan files of earlier versions say only by the name which chip theirs differs from
    return chip.base or chip.name.removesuffix("-custom")


def compiled_as(chip: Chip) -> Chip:
    """Returns the chip for which programs of ``chip`` are compiled: its base, if ``chip`` has no compiler target and is
    equal to the base in all `_IN_PROGRAMS`; else the chip itself."""
    base = chips().get(catalogue_name(chip), chip)
    compiler_target = catalogued(chip, "libtpu") or catalogued(chip, "xla_gpu")
    return chip if compiler_target or any(getattr(chip, name) != getattr(base, name) for name in _IN_PROGRAMS) else base


OTHER_NAMES = {"extends": "base", "inherits": "base", "parent": "base", "memory": "hbm_bytes", "flops": "peak_flops"}
"""Names that users mistake for keys of a chip's file -> the keys."""


_CLUSTER_KEYS = ("chip", "shape", "levels", "num_slices", "twisted", "num_islands", "island_bytes_per_s")


def read_chip(path: Path) -> Chip:
    """Returns the chip of a TOML file: from its keys, from its table ``[chip]``, or by the name ``chip``."""
    file = read_toml(path)
    key_path = ("chip",) if "chip" in file.data else ()
    if key_path:
        file.refuse(unknown_fields(file.data, _CLUSTER_KEYS, ()))
    table = file.data.get("chip", file.data)
    if isinstance(table, str):
        with file.at(key_path):
            return chip(table)
    if not isinstance(table, dict):
        raise file.error(key_path, "chip is neither a table nor a name. Write one table [chip].")
    for key in table.keys() & OTHER_NAMES.keys():
        raise file.error((*key_path, key), f"{key} is not a field. Did you mean {OTHER_NAMES[key]!r}?")
    file.refuse(unknown_fields(table, Chip.__struct_fields__, key_path))
    with file.at(key_path):
        return chip_from_table(table)


def chip_from_table(table: Mapping[str, Any]) -> Chip:
    """Returns the chip of a table, which is complete or has a ``base`` of the catalogue and the fields that differ.

    The source of fields in the table is "given". Price and power are not inherited. Raises InputError for wrong fields.
    """
    base = table.get("base")
    for name, field_type in (("base", str), ("peak_flops", dict), ("sources", dict)):
        if not isinstance(table.get(name, field_type()), field_type):
            raise InputError(f"{name} is {table[name]!r}. Give {'a name' if field_type is str else 'a table'}.")
    if isinstance(base, str) and base.endswith(".toml"):
        raise InputError(f"base {base!r} is a file. Name a chip of the catalogue.")
    entries = {base: msgspec.to_builtins(chip(base))} if isinstance(base, str) else {}
    source_by_field = {name: "given" for name in table if name not in ("base", "name", "peak_flops", "sources")}
    source_by_field |= {f"peak_flops.{dtype}": "given" for dtype in table.get("peak_flops", ())}
    fields = _merge({**table, "sources": source_by_field | table.get("sources", {})}, entries) | {"variant": "custom"}
    if base:
        fields["base"] = chip(base).name
        fields["name"] = table.get("name") or f"{base}-custom"
        fields["full_name"] = table.get("full_name") or f"{base} with its own {', '.join(source_by_field) or 'name'}"
    elif not {"name", "topology"} <= table.keys():
        raise InputError('a chip needs base = "h100" (a known chip) and what differs, or name, topology and figures.')
    built = convert_fields(fields, Chip, section="chip")
    families = sorted({entry.family for entry in chips().values() if entry.family})
    if built.family and built.family not in families:
        raise InputError(
            f"family {built.family!r} of chip {built.name!r} has no fitted numbers.{nearest(built.family, families)} "
            f"Leave it out for {'the numbers of its base' if base else 'the rates of the data sheet'}."
        )
    return built
