"""What a schedule overlaps beside what the price hides."""

import pytest

from meshwright.api.compiling import target_mesh
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.hlo.collectives import CompiledCollective
from meshwright.parallel import mesh as mesh_module
from meshwright.parallel.mesh import compiler_options
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import GivenOptions, options_of
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.overlap import compare_overlap
from tests.verify.compiled import no_cache, proof_of, request_for
from tests.verify.test_aot import SMALL

MESH = {"data": 1, "fsdp": 4, "tensor": 2}


def compiled(kind="all_gather", axes=("fsdp",), full_bytes=400, overlap="", **fields) -> CompiledCollective:
    given = {"trips": 2, "num_arrays": 1, "name": "x", "group_size": 4 if axes == ("fsdp",) else 2}
    return CompiledCollective(kind, full_bytes, axes, overlap=overlap, **{**given, **fields})


def priced() -> Breakdown:
    cluster, job = parse_cluster("h100:8x1"), Job(batch_seqs=16, seq_len=1024)
    setting = Setting(load_model("llama3-8b"), cluster, job, fitted_calibration(cluster.chip))
    return Breakdown(price_strategy(setting, Strategy(mesh=make_mesh({"fsdp": 4, "tensor": 2}))))


def rows_of(*found) -> dict:
    return {(row.kind, row.axes): row for row in compare_overlap(found, priced(), MESH).rows}


def test_bytes_on_the_wire_by_how_they_overlap_and_seconds_by_the_price():
    rows = rows_of(compiled(overlap="async fusion"), compiled(overlap="start/done", trips=1), compiled(trips=1))
    row = rows["all_gather", ("fsdp",)]
    assert (row.overlapped, row.exposed_bytes) == ({"async fusion": 600.0, "start/done": 300.0}, 300.0)
    assert row.overlapped_bytes == 900.0
    assert 0 < row.hidden_s < row.alone_s
    scatter = rows["reduce_scatter", ("tensor",)]  # an activation's, which the price hides in part
    assert (scatter.overlapped, scatter.exposed_bytes) == ({}, 0.0)
    assert 0 < scatter.hidden_s < scatter.alone_s


def test_a_row_of_one_side_and_axes_of_one_device():
    rows = rows_of(compiled("permute", ("tensor",), overlap="windowed"), compiled(axes=("data",)))
    permute = rows["permute", ("tensor",)]
    assert (permute.overlapped, permute.alone_s, permute.hidden_s) == ({"windowed": 800.0}, 0.0, 0.0)
    assert ("all_gather", ("data",)) not in rows


def test_a_collective_over_half_of_its_axes():
    """One leg on a physical axis, of two: (2 - 1) / 2 of the array."""
    assert rows_of(compiled(group_size=2))["all_gather", ("fsdp",)].exposed_bytes == 400.0


def every(overlap) -> list[CompiledCollective]:
    return [compiled(row.op, row.axes, overlap=overlap, group_size=1) for row in priced().traffic]


def test_the_step_without_the_overlap_that_is_not_compiled():
    """As priced if all of it is compiled so, without overlap if none is, and between them else."""
    parts = priced()
    whole = compare_overlap(every("start/done"), parts, MESH)
    none, half = (compare_overlap(found, parts, MESH) for found in (every(""), [*every(""), *every("start/done")]))
    alone_s = sum(parts.alone.values())
    assert (whole.beside_s, half.beside_s, none.beside_s) == pytest.approx((alone_s, alone_s / 2, 0.0))
    assert whole.priced.exposed_step_s == pytest.approx(parts.step_s)
    assert none.priced.exposed_step_s == parts.overlap().exposed_step_s > half.priced.exposed_step_s > parts.step_s
    assert none.priced.exposed_mfu * none.priced.exposed_step_s == pytest.approx(
        parts.priced.estimate.mfu * parts.step_s
    )


def test_what_was_compiled_as_another_kind_counts_by_its_axes():
    """A gather cut into permutes runs beside products; what was not compiled at all is exposed."""
    found = compare_overlap([compiled("permute", ("tensor",), overlap="windowed")], priced(), MESH)
    over = {row.axes: row.alone_s for row in found.rows if "tensor" in row.axes}
    tensor_s = sum(row.alone_s for row in found.rows if "tensor" in row.axes)
    assert len(over) > 1
    assert found.beside_s == pytest.approx(tensor_s)


@pytest.fixture(scope="module")
def proof():
    return proof_of(SMALL, "v5p:2x2x1", {"fsdp": 4})


@pytest.mark.aot
def test_a_schedule_of_a_tpu_beside_the_price(proof):
    rows = {(row.kind, row.axes): row for row in proof.overlap.rows}
    traffic = {(row.kind, row.axes): row for row in proof.traffic.rows}
    assert rows.keys() == traffic.keys()
    for key, row in rows.items():
        assert row.overlapped_bytes + row.exposed_bytes == pytest.approx(traffic[key].compiled_bytes)
        assert 0 <= row.hidden_s <= row.alone_s
    gather, scatter = rows["all_gather", ("fsdp",)], rows["reduce_scatter", ("fsdp",)]
    assert 0.2 < gather.overlapped["async fusion"] / traffic["all_gather", ("fsdp",)].derived_bytes < 1
    assert scatter.overlapped["start/done"] > 0
    found = proof.overlap.priced
    assert 0 < proof.overlap.beside_s < found.alone_s
    assert found.step_s < found.exposed_step_s < found.step_s + found.hidden_s


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
    exposed = [sum(row.exposed_bytes for row in each.overlap.rows) for each in (given, without)]
    assert exposed[0] < 0.95 * exposed[1]


@pytest.mark.aot
def test_an_option_that_libtpu_does_not_know_is_left_out(monkeypatch):
    own = options_of("v5p") | {"xla_tpu_no_such_option": True}
    monkeypatch.setattr(mesh_module, "options_of", lambda name: own)
    mesh = target_mesh(request_for(SMALL, "v5p:2x2x1", {"fsdp": 4}))
    with no_cache():  # it has no client to load a kept program with
        found = compiler_options(mesh)
    assert found == GivenOptions(options_of("v5p"), ("xla_tpu_no_such_option",))


@pytest.mark.aot
def test_blocks_of_a_collective_matmul_run_beside_its_products():
    choices = {"collective_matmul": "one-way"}
    found = proof_of(SMALL, "h100:4x1", {"tensor": 4}, choices=choices)
    (row,) = (row for row in found.overlap.rows if (row.kind, row.axes) == ("permute", ("tensor",)))
    assert 0 < row.hidden_s < row.alone_s
    assert row.overlapped_bytes > 0
