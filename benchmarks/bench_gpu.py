"""`meshwright bench` on one NVIDIA GPU within five minutes: figures, a calibration and pictures in benchmarks/results.

python benchmarks/bench_gpu.py           every part, 240 s of measuring
python benchmarks/bench_gpu.py --tiny    a few parts for some seconds on any backend, to see that it runs; keeps nothing

The files are named after the chip and the day. Without an NVIDIA GPU, and without --tiny, it says so and ends with 1.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import msgspec

from meshwright.bench.calibration import calibration_of
from meshwright.bench.results import BenchReport
from meshwright.bench.run import make_bench, run_bench
from meshwright.cli.verb import show
from meshwright.cli.verbs.bench_machine import report_text
from meshwright.core.files import write_text_whole
from meshwright.nn.attention.platform import default_platform
from meshwright.report.figure import save
from meshwright.report.machine.bench import bench_figures
from meshwright.spec.calibration import save_calibration

RESULTS = Path(__file__).parent / "results"
SECONDS, TINY_SECONDS = 240.0, 8.0
"""Of measuring: starting JAX, the last compilation and drawing come on top."""
TINY_PARTS = ("matmul", "copy", "overhead")


def keep(report: BenchReport, folder: Path) -> list[Path]:
    """The files written: all figures, the calibration and the pictures."""
    stem = f"bench-{report.chip}-{report.date[:10]}"
    figures, rates, pictures = folder / f"{stem}.json", folder / f"{stem}.toml", folder / stem
    write_text_whole(figures, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    save_calibration(calibration_of(report), rates)
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = [save(spec, pictures / name) for name, spec in bench_figures(report).items()]
    return [figures, rates, *drawn]


def main() -> None:
    """Measures the first GPU, or with --tiny the first device of any kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, help=f"in place of {SECONDS:.0f}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another folder for the files")
    arguments = parser.parse_args()
    if default_platform() != "cuda" and not arguments.tiny:
        raise SystemExit(
            f"JAX runs on {default_platform()}: an NVIDIA GPU is needed, or --tiny to see the program run."
        )
    seconds = arguments.seconds or (TINY_SECONDS if arguments.tiny else SECONDS)
    parts = TINY_PARTS if arguments.tiny else ()
    report = run_bench(make_bench(jax.devices()[:1]), parts, seconds=seconds, say=lambda line: print(line, flush=True))
    show(report_text(report))
    if arguments.tiny:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{len(keep(report, Path(folder)))} files written, and removed")
        return
    for path in keep(report, arguments.out):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
