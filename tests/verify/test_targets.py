"""What a plan is compiled for: texts for every chip, stand-ins, and the chips in the order of the mesh."""

import math
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.algebra.rewrites.torus import mesh_order
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.spec.chip import chips
from meshwright.spec.cluster import parse_cluster
from meshwright.verify import targets
from meshwright.verify.targets import MAX_CPU_DEVICES, Target, target_config, target_of, usable_target

GPUS = {name: one.xla_gpu for name, one in chips().items() if one.xla_gpu}
TPUS = [name for name, one in chips().items() if one.libtpu]
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def splits(size, count, draw):
    """A product of ``count`` factors that is ``size``."""
    found = []
    for _ in range(count - 1):
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        found.append(factor)
        size //= factor
    return [*found, size]


@st.composite
def clusters_and_meshes(draw, names):
    name = draw(st.sampled_from(names))
    axes = draw(st.permutations(AXES))[: draw(st.integers(1, 4))]
    sizes = splits(parse_cluster(name).num_chips, len(axes), draw)
    return name, dict(zip(axes, sizes, strict=True))


def order_of(placement: Placement) -> np.ndarray:
    return mesh_order(placement.mesh, placement.describe(), links=[link.name for link in placement.links])


def check_lies_as_described(placement: Placement):
    """Along a mesh axis only the links that `describe` names change, each as often as it says, inner ones first."""
    order = order_of(placement)
    sizes = [link.size for link in reversed(placement.links)]
    assert order.shape == tuple(placement.mesh.values())
    assert sorted(order.ravel()) == list(range(math.prod(sizes)))
    places = np.stack(np.unravel_index(order, sizes), axis=-1)[..., ::-1]  # by link, in the placement's order
    words = placement.describe()
    for number, (axis, size) in enumerate(placement.mesh.items()):
        lines = np.moveaxis(places, number, 0).reshape(size, -1, len(sizes))
        said = []
        for index, link in enumerate(placement.links):
            (factor,) = {len(set(line)) for line in lines[:, :, index].T}
            if factor == 1:
                continue
            said.append(
                f"{link.name} ({link.size})" if factor == link.size else f"{factor} of {link.name} ({link.size})"
            )
            # next to each other, or as far apart as the axes inside are long
            inside = [name for name, _ in link.parts].index(axis) + 1
            assert set(np.diff(sorted(set(lines[:, 0, index])))) == {math.prod(f for _, f in link.parts[inside:])}
        assert words[axis] == (" x ".join(said) or "1 chip")


@settings(max_examples=60, deadline=None)
@given(clusters_and_meshes(["v5e:4x4", "v5e:4x8", "v5p:2x2x4", "v4p:4x4x4", "v5p:4x4x8", "v6e:2x4", "tpu7x:2x2x2"]))
def test_mesh_axes_lie_on_the_links_of_a_torus(case):
    name, mesh = case
    for placement in place_axes(parse_cluster(name), mesh):
        check_lies_as_described(placement)


@settings(max_examples=40, deadline=None)
@given(clusters_and_meshes(["2*v5e:4x4", "3*v5e:2x4", "4*v5p:2x2x2", "h100:8x4", "h100:8x6", "b200:8x2", "a100:8x1"]))
def test_mesh_axes_lie_on_slices_and_nodes(case):
    name, mesh = case
    for placement in place_axes(parse_cluster(name), mesh):
        check_lies_as_described(placement)


def test_an_axis_over_slices_is_outermost():
    (placement, *_) = place_axes(parse_cluster("2*v5e:2x2"), {"data": 4, "tensor": 2})
    order = order_of(placement)
    assert "slices (2)" in placement.describe()["data"]
    assert (order[:2] < 4).all()
    assert (order[2:] >= 4).all()


def test_tensor_parallelism_stays_in_a_node():
    (placement,) = place_axes(parse_cluster("h100:8x2"), {"fsdp": 4, "tensor": 4})
    assert order_of(placement).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("cluster", "topology", "options"),
    [
        ("v5e:4x4", "v5e:4x4", {}),
        ("v6e:16x16", "v6e:16x16", {"wrap": (True, True, False)}),
        ("v5e:4x16", "v5e:4x16", {"wrap": (False, True, False)}),
        ("2*v5e:4x4", "v5e:4x4", {"num_slices": 2}),
        ("v4p:2x2x1", "v4:2x2x1", {"chip_config_name": "megacore"}),
        ("v5p:2x2x1", "v5p:2x2x1", {}),
        ("v5p:4x4x8", "v5p:4x4x8", {"wrap": (True, True, True)}),
    ],
)
def test_topologies_of_tpus(cluster, topology, options):
    target = target_of(parse_cluster(cluster))
    assert (target.platform, target.topology, target.options) == ("tpu", topology, options)
    assert target.num_devices == parse_cluster(cluster).num_chips


def test_a_twisted_torus():
    target = target_of(msgspec.structs.replace(parse_cluster("v5p:4x4x8"), twisted=True))
    assert target.topology == "v5p:4x4x8_twisted"
    assert target.options["wrap"] == (True, True, True)


def test_slices_that_are_not_offered():
    """Where libtpu has a topology the program is compiled, with a note; one chip is a host of its own."""
    with pytest.raises(CannotRunError, match=r"v5p:1x2x4 is not a slice that is offered .* use verify --for cpu"):
        target_of(parse_cluster("v5p:1x2x4"))
    lowered = target_of(parse_cluster("v5p:1x2x4"), only_lower=True)
    assert (lowered.platform, lowered.num_devices) == ("tpu", 8)
    assert "v5p:1x2x4 is not a slice that is offered" in lowered.note
    assert "v5e:2x6 is not a slice that is offered" in target_of(parse_cluster("v5e:2x6")).note
    assert target_of(parse_cluster("v5e:1x1")).options == {"chips_per_host_bounds": (1, 1, 1)}


def test_a_chip_that_is_two_devices_says_so():
    target = target_of(parse_cluster("tpu7x:2x2x1"))
    assert "two devices" in target.note


@pytest.mark.parametrize("chip", sorted(GPUS))
def test_gpus(chip):
    cluster = parse_cluster(f"{chip}:8x4") if chip != "gb200" else parse_cluster("gb200:72x4")
    target = target_of(cluster)
    assert (target.platform, target.num_devices) == ("cuda", cluster.num_chips)
    assert target.options["topology"] == f"1x4x{cluster.domain}"
    assert target.options["target_config"].startswith("gpu_device_info {")


def test_every_chip_of_the_catalogue_has_a_target_or_a_line_that_says_none():
    with_one, without = set(), {}
    for name, chip in chips().items():
        shape = {"torus": "2x2x1" if chip.num_ici_axes == 3 else "2x2", "switched": "8x1"}.get(chip.topology)
        if shape and (chip.domain_chips or 8) >= 8:
            try:
                with_one.add((name, target_of(parse_cluster(f"{name}:{shape}")).platform))
            except (CannotRunError, InputError) as error:
                without[name] = str(error)
    assert {(name, "tpu") for name in TPUS} | {(name, "cuda") for name in GPUS} >= with_one
    assert {name for name, _ in with_one} >= {*TPUS, "a100", "h100", "h200", "b200"}
    assert "use verify --for cpu" in without["mi300x"]
    assert not any("\n" in line for line in without.values())


# -- what is installed --------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(targets, "is_installed", lambda platform: platform == "cpu")


@pytest.mark.parametrize(("cluster", "extra"), [("v5e:4x4", "tpu"), ("h100:8x1", "gpu")])
def test_without_a_compiler_a_cpu_stands_in_and_says_so(nothing_installed, cluster, extra):
    target = usable_target(parse_cluster(cluster))
    assert (target.platform, target.num_devices) == ("cpu", parse_cluster(cluster).num_chips)
    assert f'pip install "meshwright[{extra}]"' in target.note
    assert "does not show memory" in target.note
    own = target_of(parse_cluster(cluster)).platform
    with pytest.raises(CannotRunError, match=rf"meshwright\[{extra}\]"):
        usable_target(parse_cluster(cluster), wanted=own)


def test_too_many_devices_for_a_cpu(nothing_installed):
    with pytest.raises(CannotRunError, match=f"at most {MAX_CPU_DEVICES}"):
        usable_target(parse_cluster("v5p:16x20x28"))


def test_gpus_without_a_compiler_are_lowered_for_cpus(nothing_installed):
    """cuDNN's attention asks for devices; what Pallas makes for TPUs does not."""
    found = target_of(parse_cluster("h100:8x2"), only_lower=True)
    assert (found.platform, found.num_devices) == ("cpu", 16)
    assert found.note.startswith("lowered for CPUs: the compiler for cuda is not installed (pip install")
    assert target_of(parse_cluster("v5e:2x2"), only_lower=True).platform == "tpu"


@pytest.mark.parametrize(("part", "hosts"), [("v5e:1x2", (1, 2, 1)), ("v6e:4x1", (2, 1, 1)), ("v5e:3x5", (1, 1, 1))])
def test_parts_of_slices_have_smaller_hosts(part, hosts):
    assert target_of(parse_cluster(part)).options["chips_per_host_bounds"] == hosts


def test_a_compiler_that_is_there_is_taken(monkeypatch):
    monkeypatch.setattr(targets, "is_installed", lambda platform: True)
    assert usable_target(parse_cluster("v5e:4x4")).platform == "tpu"
    assert usable_target(parse_cluster("v5e:4x4"), wanted="tpu").note == ""
    assert "as requested" in usable_target(parse_cluster("v5e:4x4"), wanted="cpu").note


def test_a_compiler_of_another_kind_is_refused():
    with pytest.raises(CannotRunError, match="compiled for tpu, not cuda"):
        usable_target(parse_cluster("v5e:4x4"), wanted="cuda")


def test_this_machine_needs_no_note():
    target = usable_target(parse_cluster("cpu:4"))
    assert (target.platform, target.num_devices, target.note) == ("cpu", 4, "")


def test_environments_look_for_no_hardware():
    tpu = Target(platform="tpu", num_devices=4).environment
    assert tpu["TPU_SKIP_MDS_QUERY"] == "1"
    assert Target(platform="cuda", num_devices=4).environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    cpu = Target(platform="cpu", num_devices=6).environment
    assert cpu["JAX_PLATFORMS"] == "cpu"
    assert cpu["XLA_FLAGS"].split()[0].endswith("device_count=6")
    assert all(one["TF_CPP_MIN_LOG_LEVEL"] == "2" for one in (tpu, cpu))


# -- descriptions of GPUs for the compiler ------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_text_says_every_figure_once(name):
    gpu = GPUS[name]
    text, figures = target_config(gpu), msgspec.to_builtins(gpu)
    fields = re.findall(r"(\w+): ([\d.]+)", text)
    for key in ("core_count", "device_memory_size", "memory_bandwidth", "clock_rate_ghz", "l2_cache_size"):
        assert [value for field, value in fields if field == key] == [str(figures[key])]
    assert text.count("{") == text.count("}")
    major, minor = re.search(r"major: (\d+) minor: (\d+)", text).groups()
    assert f"{major}.{minor}" == str(figures["capability"]).rstrip("a")
    assert ("ACCELERATED_FEATURES" in text) == str(figures["capability"]).endswith("a")


@pytest.mark.parametrize("name", sorted(GPUS))
def test_figures_agree_with_the_data_sheets(name):
    """Memory within a tenth: the compiler is told GiB that the driver leaves. Bandwidth within 5%."""
    chip, gpu = chips()[name], GPUS[name]
    assert gpu.device_memory_size == pytest.approx(chip.hbm_bytes, rel=0.1)
    assert gpu.memory_bandwidth == pytest.approx(chip.hbm_bytes_per_s, rel=0.05)
