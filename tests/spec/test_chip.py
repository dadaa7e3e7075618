"""The chip catalogue: figures, sources, names, peaks."""

import re
from pathlib import Path

import msgspec
import pytest

from meshwright.cli.sweeps.fields import sweep_clusters
from meshwright.core.errors import InputError
from meshwright.cost.formulas.anatomy import gpu_peak_from_anatomy, tpu_peak_from_anatomy
from meshwright.spec.chip import (
    Chip,
    GivenOptions,
    LibtpuTarget,
    XlaGpuTarget,
    chip,
    chip_from_table,
    chip_of_kind,
    chips,
    compiler_options,
    compute_dtype,
    known,
    options_of,
    peak,
)
from meshwright.spec.cluster import _LevelsFile, _ShapeFile, _SizedLevel, parse_cluster, parse_clusters

UNSOURCED = {
    "name", "aliases", "family", "device_kind", "full_name", "vendor", "variant", "topology", "sources",
    "nvlink_hop_s", "network_hop_s", "dcn_hop_s",
}  # fmt: skip


WANTED = {
    "google": [
        "v2",
        "v2-book",
        "v3",
        "v4p",
        "v5e",
        "v5p",
        "v6e",
        "tpu7x",
        "v4p-book",
        "v5e-book",
        "v5p-book",
        "v6e-book",
    ],
    "nvidia": [
        "v100",
        "a100-40gb",
        "a100",
        "h100",
        "h100-pcie",
        "h100-book",
        "h200",
        "b200",
        "gb200",
        "b300",
        "gb300",
        "h800",
        "a100-pcie",
        "h200-nvl",
        "l40s",
        "rtx4090",
        "rtx5090",
        "rtx-pro-6000",
    ],
    "amd": ["mi250x", "mi300x", "mi325x", "mi350x", "mi355x"],
    "aws": ["trn1", "trn2", "trn3", "inf2"],
    "apple": ["m3"],
    "intel": ["core-ultra", "gaudi2", "gaudi3", "arc-pro-b60"],
    "host": ["cpu"],
}


def test_names_and_aliases():
    for vendor, names in WANTED.items():
        assert {chip(name).vendor.lower() for name in names} == {vendor}
    aliases = {"v4": "v4p", "v7x": "tpu7x", "ironwood": "tpu7x", "a100-80gb": "a100", "H100": "h100"}
    assert {alias: chip(alias).name for alias in aliases} == aliases


@pytest.mark.parametrize("name", chips())
def test_every_figure_has_its_source(name):
    made = chip(name)
    default = Chip(name="x", topology="host")
    figures = [f for f in Chip.__struct_fields__ if f not in UNSOURCED and getattr(made, f) != getattr(default, f)]
    assert [figure for figure in figures if not made.sources.get(figure)] == []


def test_conventions_of_the_catalogue():
    h100 = chip("h100")
    assert h100.peak_flops["bf16"] == 989.4e12
    assert (h100.peak_flops["tf32"], h100.peak_flops["fp32"], h100.num_sms) == (494.7e12, 67e12, 132)
    assert h100.nvlink_bytes_per_s == 450e9
    assert chip("v5p").ici_axis_bytes_per_s == 1.8e11
    assert (chip("v5p").dcn_bytes_per_s, chip("v5e").dcn_bytes_per_s) == (6.25e9, 3.125e9)
    assert chip("v5e").memory_bytes == 15.75 * 2**30
    assert chip("v5e-book").memory_bytes == 16e9
    assert (chip("v5p-book").hbm_bytes_per_s, chip("v5p-book").hbm_bytes) == (2.8e12, 96e9)
    assert chip("v5p-book").peak_flops == chip("v5p").peak_flops


def test_peak_names_what_exists():
    assert peak(chip("a100"), "fp16") == 312e12
    with pytest.raises(InputError, match=r"v5e has no fp32 matrix rate in its table; it has bf16, int8"):
        peak(chip("v5e"), "fp32")
    with pytest.raises(InputError, match="v100 has no bf16"):
        peak(chip("v100"), "bf16")
    with pytest.raises(InputError, match="cpu has no known peak"):
        peak(chip("cpu"), "fp32")


@pytest.mark.parametrize(
    ("name", "dtypes", "computed"),
    [
        ("v5e", ("bf16", "int8"), "bf16"),
        ("v5e", ("int8", "int8"), "int8"),
        ("v5e", ("int4", "int4"), "bf16"),
        ("v5e", ("fp8", "fp8"), "bf16"),
        ("h100", ("fp8", "int8"), "bf16"),
        ("h100", ("fp8", "fp8"), "fp8"),
        ("v100", ("fp8", "fp8"), "fp16"),
        ("v5e", ("fp32", "int8"), "fp32"),
    ],
)
def test_products_are_computed_in_the_widest_operand(name, dtypes, computed):
    assert compute_dtype(chip(name), *dtypes) == computed


def test_unknown_names_and_figures():
    with pytest.raises(InputError, match=r"unknown chip 'v5ee'\. Did you mean 'v5e'"):
        chip("v5ee")
    with pytest.raises(InputError, match="nic_bytes_per_s of trn3 is not known"):
        known(chip("trn3"), "nic_bytes_per_s")


def test_chip_from_a_table_on_a_base():
    made = chip_from_table({"base": "v5e", "name": "mine", "hbm_bytes_per_s": 1e12, "peak_flops": {"bf16": 1e14}})
    assert (made.name, made.variant, made.hbm_bytes_per_s) == ("mine", "custom", 1e12)
    assert made.peak_flops == {"bf16": 1e14, "int8": 394e12}
    with pytest.raises(InputError, match="Did you mean 'hbm_bytes_per_s'"):
        chip_from_table({"base": "v5e", "hbm_byte_per_s": 1e12})
    with pytest.raises(InputError, match="positive"):
        chip_from_table({"base": "v5e", "peak_flops": {"bf16": -1.0}})


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"pod_shape": [16, -16]}, "the chip's pod_shape.1 is -16, give a positive number."),
        ({"hbm_bytes": float("nan")}, "chip.hbm_bytes is nan: give a finite number, at most 1e+60."),
        ({"ici_hop_s": float("inf")}, "chip.ici_hop_s is inf: give a finite number, at most 1e+60."),
        ({"peak_flops": {"bf16": 0.0}}, "the chip's peak_flops.bf16 is 0, give a positive number."),
        ({"hbm_bytes": "a"}, "chip.hbm_bytes is 'a'. Give a finite number."),
    ],
)
def test_figures_that_no_chip_has_are_refused_in_one_line(figures, words):
    with pytest.raises(InputError) as error:
        chip_from_table({"base": "v5e", **figures})
    assert str(error.value) == words


def test_figures_in_the_tables_of_a_chip_are_checked_too():
    target = msgspec.to_builtins(chip("h100").xla_gpu)
    with pytest.raises(InputError, match=r"the chip's xla_gpu.core_count is -1, give a positive number\.$"):
        chip_from_table({"base": "h100", "xla_gpu": target | {"core_count": -1}})


def test_chips_survive_json():
    assert msgspec.json.decode(msgspec.json.encode(chip("v5p")), type=Chip) == chip("v5p")


def test_links_and_peaks_that_follow_from_their_parts():
    """One way, dense: half of the data sheet's both ways, compute units x clock x FLOPs a cycle."""
    assert chip("h800").nvlink_bytes_per_s == 400e9 / 2
    assert (chip("h800").peak_flops["bf16"], chip("h800").hbm_bytes) == (989.4e12, 80e9)
    assert chip("mi325x").nvlink_bytes_per_s == 7 * 128e9 / 2
    assert chip("mi355x").nvlink_bytes_per_s == pytest.approx(7 * 153.6e9 / 2)
    assert chip("mi355x").peak_flops["bf16"] == pytest.approx(256 * 2.4e9 * 4096, rel=1e-4)
    assert chip("mi350x").peak_flops["fp4"] == pytest.approx(256 * 2.2e9 * 16384, rel=1e-4)
    assert chip("trn2").nvlink_bytes_per_s == 1024e9 / 2
    assert chip("trn2").nic_bytes_per_s == 3200e9 / 8 / 16
    assert chip("gb200").pcie_bytes_per_s == 900e9 / 2 / 2
    assert chip("gaudi3").nvlink_bytes_per_s == 21 * 200e9 / 8
    assert tpu_peak_from_anatomy(chip("v5p")) == pytest.approx(459e12, rel=1e-3)
    assert tpu_peak_from_anatomy(chip("v4p")) == pytest.approx(275e12, rel=1e-2)
    for name in ("rtx4090", "rtx5090"):
        assert gpu_peak_from_anatomy(chip(name)) == pytest.approx(chip(name).peak_flops["bf16"], rel=1e-3)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("v7", "tpu7x"),
        ("trainium", "trn1"),
        ("trainium1", "trn1"),
        ("trainium2", "trn2"),
        ("inferentia2", "inf2"),
        ("rtx-pro-6000-blackwell", "rtx-pro-6000"),
    ],
)
def test_more_names(word, name):
    assert chip(word).name == name


def test_what_is_paid_for_is_the_book_s_alone():
    """Another chip has neither the price nor the power of its base; the book's variant is the same chip."""
    assert (chip("h100-book").price_usd_per_hour, chip("h100-book").power_w) == (10.8, 700)
    assert (chip("h800").price_usd_per_hour, chip("h800").power_w) == (None, None)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("big.toml").write_text('base = "h100"\nhbm_bytes = 96e9\nhbm_bytes_per_s = 2e12\n')
    return Path("big.toml")


def test_a_chip_of_one_s_own_is_a_file(own):
    made = chip("big.toml")
    assert (made.name, made.hbm_bytes, made.hbm_bytes_per_s) == ("h100-custom", 96e9, 2e12)
    assert made.peak_flops == chip("h100").peak_flops
    assert (made.price_usd_per_hour, made.power_w) == (None, None)
    assert (made.sources["hbm_bytes"], made.sources["num_sms"]) == ("given", chip("h100").sources["num_sms"])
    own.write_text(f"[chip]\n{own.read_text()}power_w = 500\n")
    assert (chip("big.toml").power_w, chip("big.toml").hbm_bytes) == (500, 96e9)
    own.write_text('base = "v5e"\nhbm_bytes = 32e9\n')
    assert chip("big.toml").memory_bytes == 32e9  # what the compiler offers of 16 GB is not taken over


def test_a_tpu7x_has_what_the_compiler_offers_to_its_two_devices():
    assert chip("tpu7x").memory_bytes == 2 * 94.75 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "h100"\nhbm_byte = 1e9', "big.toml:2: hbm_byte is not a field. Did you mean 'hbm_bytes'"),
        ('base = "h10"', "big.toml: unknown chip 'h10'. Did you mean 'h100'"),
        ('base = "big.toml"', "base 'big.toml' is a file. Name a chip of the catalogue"),
        ('[chip]\nbase = "h100"\nhbm_bytes = -1.0', "big.toml:1: the chip's hbm_bytes is -1"),
        ("hbm_bytes = 96e9", 'a chip needs base = "h100" (a known chip) and what differs, or name'),
        ('name = "big"', "or name, topology and figures"),
        ('base = "h100"\n[peak_flops]\nbf17 = 1e15', "'bf17' is not a dtype of matrix products. Did you mean 'bf16'?"),
        ('base = "h100"\nmemory = 96e9', "big.toml:2: memory is not a field. Did you mean 'hbm_bytes'?"),
        ('inherits = "h100"', "big.toml:1: inherits is not a field. Did you mean 'base'?"),
        ("[[chip]]\nname = 'a'", "one table"),
        ('chip = "h100"\nshap = [4]', "big.toml:2: shap is not a field"),
    ],
)
def test_faults_of_a_chip_file(own, text, message):
    own.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        chip("big.toml")


def test_a_cluster_of_a_chip_file(own):
    made = parse_cluster("big.toml:8x4")
    assert (made.shape, made.chip) == ((8, 4), chip("big.toml"))
    assert [one.shape for one in parse_clusters("./big.toml:32chips")] == [(8, 4)]
    assert [one.shape for one in sweep_clusters("big.toml:8x1..8x4")] == [(8, 1), (8, 2), (8, 4)]
    with pytest.raises(InputError, match=re.escape("big.toml is a chip. Write the sizes of a cluster behind it")):
        parse_cluster("big.toml")
    own.write_text('chip = "h100"\nshape = [8, 4]\n')
    assert parse_cluster("big.toml").short_name == "h100:8x4"
    with pytest.raises(InputError, match="Name the file only"):
        parse_cluster("big.toml:8x4")


def test_a_price_is_a_number_of_dollars():
    assert chip("v5p").priced(2.5).price_usd_per_hour == 2.5
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="is no price"):
            chip("v5p").priced(wrong)


def test_every_compiler_option_has_evidence_for_each_of_its_chips():
    for row in compiler_options():
        assert row.exposed_gb
        for name, (without, given) in row.exposed_gb.items():
            assert chips()[name].device_kind
            assert chips()[name].libtpu or chips()[name].xla_gpu
            assert given < 0.9 * without
        assert {name for name in chips() if row.options.items() <= options_of(name).items()} == set(row.exposed_gb)


def test_no_two_rows_set_one_option_of_a_chip():
    for name in chips():
        rows = [row for row in compiler_options() if name in row.exposed_gb]
        assert len(options_of(name)) == sum(len(row.options) for row in rows)
    assert options_of("h100") == options_of("v5e") == options_of("cpu") == {}


@pytest.mark.parametrize(("kind", "name"), [("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU v4", "v4p")])
def test_devices_get_the_options_of_their_chip(kind, name):
    assert options_of(chip_of_kind(kind).name) == options_of(name) != {}


def test_refused_options_are_one_line():
    assert GivenOptions({"xla_c": True}).notes == []
    assert GivenOptions({}, ("xla_a", "xla_b")).notes == [
        "the installed compiler refuses xla_a, xla_b: compiled without"
    ]


def test_the_page_names_every_key_of_chip_and_cluster_files():
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    tables = (Chip, LibtpuTarget, XlaGpuTarget, _LevelsFile, _ShapeFile)
    keys = {*(key for table in tables for key in table.__struct_fields__)}
    keys |= {f"levels.{key}" for key in _SizedLevel.__struct_fields__}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_tpu_v2_and_a_core_of_it():
    """Table of Jouppi et al. 2020: 16 GB at 700 GB/s, 2 cores of one 128 x 128 unit at 700 MHz: 45.9e12."""
    whole, core = chip("v2"), chip("v2-book")
    assert (whole.hbm_bytes, whole.hbm_bytes_per_s, whole.power_w) == (16e9, 700e9, 280)
    assert tpu_peak_from_anatomy(whole) == pytest.approx(2 * 2 * 128**2 * 700e6) == pytest.approx(46e12, rel=3e-3)
    assert (2 * core.hbm_bytes, 2 * core.hbm_bytes_per_s) == (whole.hbm_bytes, whole.hbm_bytes_per_s)


def test_the_clock_of_v6e_gives_its_peak():
    """4 units of 256 x 256 cells, 2 FLOPs a cell and cycle, at 1.75 GHz."""
    assert tpu_peak_from_anatomy(chip("v6e")) == 4 * 256**2 * 2 * 1.75e9 == pytest.approx(918e12, rel=6e-4)
