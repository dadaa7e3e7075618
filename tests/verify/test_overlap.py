"""What a schedule overlaps beside what the price hides."""

import pytest

from meshwright.core.labels import StepLabel
from meshwright.hlo.collectives import CompiledCollective
from meshwright.parallel import mesh as mesh_module
from meshwright.parallel.mesh import compiler_options
from meshwright.spec.chip import GivenOptions, options_of
from meshwright.verify.compiling import target_mesh
from meshwright.verify.expected import Expected, StepDerivation
from meshwright.verify.overlap import OverlapRow, compare_overlap
from tests.verify.compiled import proof_of, request_for
from tests.verify.test_aot import SMALL

MESH = {"data": 1, "fsdp": 4, "tensor": 2}
LABEL = StepLabel("layer", "forward", "wq", "all_gather")


def compiled(kind="all_gather", axes=("fsdp",), full_bytes=400, overlap="", **fields) -> CompiledCollective:
    given = {"trips": 2, "num_arrays": 1, "name": "x", "group_size": 4 if axes == ("fsdp",) else 2}
    return CompiledCollective(kind, full_bytes, axes, overlap=overlap, **{**given, **fields})


def expected(kind="all_gather", axes=("fsdp",), full_bytes=800, *, hides) -> Expected:
    group = 4 if axes == ("fsdp",) else 2
    return Expected(
        label=LABEL, kind=kind, axes=axes, num_arrays=2, full_bytes=full_bytes, element_bytes=2, group_size=group,
        hides=hides,
    )  # fmt: skip


def test_bytes_on_the_wire_by_how_they_overlap():
    found = [compiled(overlap="async fusion"), compiled(overlap="start/done", trips=1), compiled(trips=1)]
    (row,) = compare_overlap(
        [expected(hides=True, full_bytes=1200), expected(hides=False, full_bytes=400)], found, MESH
    )
    assert row == OverlapRow(
        kind="all_gather",
        axes=("fsdp",),
        overlapped={"async fusion": 600.0, "start/done": 300.0},
        exposed_bytes=300.0,
        derived_bytes=1200.0,
        hidden_bytes=900.0,
    )
    assert row.overlapped_bytes == 900.0


def test_a_row_of_one_side_and_axes_of_one_device():
    found = [compiled("permute", ("tensor",), overlap="windowed"), compiled(axes=("data",))]
    permute, gather = compare_overlap([expected(hides=True, full_bytes=80)], found, MESH)
    assert (permute.kind, permute.overlapped, permute.hidden_bytes) == ("permute", {"windowed": 800.0}, 0.0)
    assert (gather.kind, gather.exposed_bytes, gather.hidden_bytes) == ("all_gather", 0.0, 60.0)


def test_a_collective_over_half_of_its_axes():
    """One leg on a physical axis, of two: (2 - 1) / 2 of the array."""
    (row,) = compare_overlap([], [compiled(group_size=2)], MESH)
    assert row.exposed_bytes == 400.0


@pytest.fixture(scope="module")
def proof():
    return proof_of(SMALL, "v5p:2x2x1", {"fsdp": 4})


@pytest.mark.aot
def test_a_schedule_of_a_tpu_beside_the_price(proof):
    rows = {(row.kind, row.axes): row for row in proof.overlap}
    traffic = {(row.kind, row.axes): row for row in proof.traffic.rows}
    assert rows.keys() == traffic.keys()
    for key, row in rows.items():
        assert row.overlapped_bytes + row.exposed_bytes == pytest.approx(traffic[key].compiled_bytes)
        assert row.derived_bytes == pytest.approx(traffic[key].derived_bytes)
    # weights and gradients, which the price hides whole
    gather, scatter = rows["all_gather", ("fsdp",)], rows["reduce_scatter", ("fsdp",)]
    assert (gather.hidden_bytes, scatter.hidden_bytes) == (gather.derived_bytes, scatter.derived_bytes)
    assert 0.2 < gather.overlapped["async fusion"] / gather.derived_bytes < 1
    assert scatter.overlapped["start/done"] > 0


@pytest.mark.aot
def test_verify_compiles_with_the_table_of_its_chip(proof):
    assert proof.outcome.compiler == GivenOptions(options_of("v5p"))


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v4p:2x2x1", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_less_is_exposed_with_the_options_than_without(on, monkeypatch):
    axes = {"fsdp": 4}
    given = proof_of(SMALL, on, axes)
    assert given.outcome.compiler.used == options_of(on.partition(":")[0])
    flags = " ".join(f"--{name}=auto" for name in given.outcome.compiler.used)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    without = proof_of(SMALL, on, axes)
    assert without.outcome.compiler.used == {}
    exposed = [sum(row.exposed_bytes for row in each.overlap) for each in (given, without)]
    assert exposed[0] < 0.95 * exposed[1]


@pytest.mark.aot
def test_an_option_that_libtpu_does_not_know_is_left_out(monkeypatch):
    own = options_of("v5p") | {"xla_tpu_no_such_option": True}
    monkeypatch.setattr(mesh_module, "options_of", lambda name: own)
    mesh = target_mesh(request_for(SMALL, "v5p:2x2x1", {"fsdp": 4}))
    assert compiler_options(mesh) == GivenOptions(options_of("v5p"), ("xla_tpu_no_such_option",))


@pytest.mark.aot
def test_blocks_of_a_collective_matmul_run_beside_its_products():
    choices = {"collective_matmul": "one-way"}
    found = proof_of(SMALL, "h100:4x1", {"tensor": 4}, choices=choices)
    (row,) = (row for row in found.overlap if (row.kind, row.axes) == ("permute", ("tensor",)))
    assert row.hidden_bytes == row.derived_bytes
    assert row.overlapped_bytes > 0


def test_what_the_price_hides():
    request = request_for(SMALL, "cpu:8", {"fsdp": 4, "tensor": 2})
    found = {(one.label.phase, one.kind, one.axes): one.hides for one in StepDerivation(request).expected()}
    assert found["forward", "all_gather", ("fsdp",)]
    assert found["backward", "reduce_scatter", ("fsdp",)]
    assert not found["forward", "all_gather", ("tensor",)]
    assert not found["forward", "reduce_scatter", ("tensor",)]
