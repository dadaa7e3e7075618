"""Pictures of a benchmark: every part with points has one, and the points lie where they were measured."""

import msgspec
import pytest

from meshwright.bench import results
from meshwright.bench.fit import fit_knee
from meshwright.bench.timing import timing_of
from meshwright.report.figure import save
from meshwright.report.machine.bench import bench_figures
from meshwright.spec.calibration import CollectiveRate
from tests.charts import marks, panels, said, texts

FACTS = {
    "machine": "8 NVIDIA H200", "device_kind": "NVIDIA H200", "platform": "cuda", "num_devices": 8, "chip": "h200",
    "date": "2026-11-21T12:00:00+00:00", "versions": {"jax": "0"}, "seconds": 60.0, "took_s": 59.0,
    "memory_bytes": 1e11,
}  # fmt: skip
SIZES = {"D": 4096, "F": 14336, "N": 32, "K": 8, "H": 128}


def products(dtype, top):
    return [
        results.Product(
            dtype=dtype, m=n, k=n, n=n, contents="normal", seconds=timing_of([2 * n**3 / rate]), flops_per_s=rate,
            share_of_peak=None,
        )
        for n, rate in ((2**p, top * min(1.0, 2.0 ** (p - 12))) for p in range(9, 16))
    ]  # fmt: skip


def layers():
    seconds = {2**p: max(1e-4, 1e-4 * 2**p / 200) for p in range(14)}
    return tuple(
        results.LayerTime(tokens=b, seconds=timing_of([s]), tokens_per_us=b / s * 1e-6, flops_per_s=2 * 2.2e8 * b / s)
        for b, s in seconds.items()
    )


def chains():
    fused = [(k, True, max(1.0, k / 60)) for k in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    eager = [(k, False, float(k)) for k in (1, 2, 4, 8)]
    return tuple(
        results.ChainTime(
            repeats=k, fused=one, seconds=timing_of([s * 1e-4]), flops_per_s=k * 1e12 / s, bytes_per_s=4e12 / s
        )
        for k, one, s in fused + eager
    )


def collectives():
    made = []
    for size in (8, 4, 2):
        for number, kind in enumerate(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")):
            start, slope = 1e-5 * (number + 1), 1 / 3e11 * (number + 1)
            times = tuple(
                results.CollectiveTime(
                    array_bytes=b, seconds=timing_of([1.05 * (start + slope * b)]), fitted_s=start + slope * b,
                    datasheet_s=None,
                )
                for b in (2**14, 2**17, 2**20, 2**23, 2**26, 2**29)
            )  # fmt: skip
            rate = CollectiveRate(kind=kind, group_size=size, latency_s=start, bytes_per_s=1 / slope)
            group = results.Group(axis="group", size=size, mesh={"others": 8 // size, "group": size})
            made.append(results.Collective(kind=kind, group=group, times=times, rate=rate, fit_error=0.05))
    return tuple(made)


@pytest.fixture
def full():
    measured = layers()
    knee = fit_knee([layer.tokens for layer in measured], [layer.seconds.median_s for layer in measured])
    copy = results.Copy(kind="copy", array_bytes=2**30, seconds=timing_of([5e-4]), bytes_per_s=4.2e12)
    return results.BenchReport(
        **FACTS,
        matmul=results.MatmulPart(sweep=(*products("bf16", 7e14), *products("fp8", 1.3e15))),
        copy=results.CopyPart(copies=(copy,)),
        elementwise=results.ElementwisePart(
            elements=2**28, cache_bytes=5e7, chains=chains(), doubles_at=120.0, predicted_at=112.0
        ),
        batch=results.BatchPart(sizes=SIZES, dtype="bf16", layers=measured, knee=knee, predicted_knee=170.0),
        collectives=results.CollectivesPart(collectives=collectives()),
    )


def test_every_part_has_its_picture(full):
    figures = bench_figures(full)
    assert set(figures) == {
        "roofline.png", "matmul.png", "elementwise.png", "batch.png", "throughput.png", "collectives.png",
    }  # fmt: skip


def test_nothing_measured_draws_nothing():
    assert bench_figures(results.BenchReport(**FACTS)) == {}
    short = results.BenchReport(
        **FACTS, matmul=results.MatmulPart(), copy=results.CopyPart(), collectives=results.CollectivesPart()
    )
    assert bench_figures(short) == {}


def test_the_knee_of_the_layers_is_drawn_where_it_is(full):
    assert texts(bench_figures(full)["batch.png"]) == ["knee 200", "critical batch 170"]


def test_points_and_lines_of_collectives(full, tmp_path):
    found = panels(bench_figures(full)["collectives.png"])
    assert [panel["title"]["text"] for panel in found] == ["8 devices", "4 devices", "2 devices"]
    (points,) = marks(found[0], "point")
    assert len(points["rows"]) == 5 * 6
    last = [row for line in marks(found[0], "line") for row in line["rows"] if row["name"] == "AllReduce"][-1]
    assert last["x"] == pytest.approx(2**29)
    assert last["y"] == pytest.approx(1e6 * (3e-5 + 3 * 2**29 / 3e11))
    for name in ("roofline.png", "collectives.png"):
        assert save(bench_figures(full)[name], tmp_path / name).stat().st_size > 10_000


def test_the_roofline_is_the_data_sheets_where_there_is_one(full):
    figure = bench_figures(full)["roofline.png"]
    assert said(figure)["title"]["text"] == "Measured on one NVIDIA H200, under the rates of the data sheet"
    (roof,) = marks(figure, "line")
    assert {row["name"] for row in roof["rows"]} == {"memory  4.8 TB/s"}
    assert max(row["y"] for row in roof["rows"]) == 989e12


def test_the_roofline_of_a_machine_without_data_sheet_is_what_it_reached(full):
    here = msgspec.structs.replace(full, chip="cpu", platform="cpu", device_kind="cpu")
    figure = bench_figures(here)["roofline.png"]
    assert said(figure)["title"]["text"] == "Measured on an emulated device, under the rates of this run"
    assert {row["name"] for row in marks(figure, "line")[0]["rows"]} == {"memory  4.2 TB/s"}
