"""`meshwright bench` on one GPU, and what its rates predict of the measured steps: the fourth part of `on_gpu.sh`.

Reads ``train.json`` and ``serve.json`` in the folder of the results, and sets beside each measurement the prediction by
the rates that are measured here and the one by the rates that are shipped. Writes the rates as ``rates.toml``, which
`--calibration` takes, and all measurements into ``bench.json``.
"""

import json
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
from gpu_part import Part, model_of, this_chip
from serve_gpu import Served
from train_gpu import CASES, STATE, TINY, job_of

from meshwright.api.rates import rates_for
from meshwright.bench.calibration import calibration_of
from meshwright.bench.run import make_bench, run_bench
from meshwright.cli.verb import show
from meshwright.cli.verbs.bench_machine import report_text
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.spec.calibration import Calibration, save_calibration
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import Strategy, make_mesh

DTYPES = ("bf16", "fp8")
SECONDS, TINY_SECONDS = 60.0, 8.0
TINY_PARTS = ("matmul", "copy", "overhead")
GOAL = 0.1


def measured(part: Part, name: str) -> list[dict[str, Any]]:
    """The cases of another part that have seconds; none if it did not run."""
    path = part.options.out / f"{name}.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else []
    return [case for case in cases if "error" not in case and not case["case"].startswith("generate")]


def steps(part: Part) -> Iterator[tuple[str, float, Any]]:
    """Yields each measured step with a function from rates to its predicted seconds."""
    cluster, plain = parse_cluster(f"{this_chip().name}:1"), make_mesh({})
    known = {case.name: case for case in (TINY if part.tiny else CASES)}
    for one in measured(part, "train"):
        case = known[one["case"]]
        model = model_of(case.model, layers=case.layers, tiny=part.tiny)

        def trained(rates: Calibration | None, model: Any = model, case: Any = case) -> float:
            strategy = Strategy(mesh=plain, remat=case.remat, state=STATE)
            return float(estimate_step(Setting(model, cluster, job_of(case), rates), strategy).step_s)

        yield f"train {case.name}", one["meshwright"]["step_s"], trained
    for one in measured(part, "serve"):
        served = Served("" if one["weights"] == "bf16" else one["weights"], part.tiny, loads=False)

        def decoded(rates: Calibration | None, served: Served = served, count: int = one["sequences"]) -> float:
            return served.priced(count, rates)[1]

        yield f"serve {one['case']}", one["seconds"], decoded


def main() -> None:
    """Measures the first device, and predicts."""
    part = Part("bench", f"predictions by its rates within {GOAL:.0%}", __doc__)
    found: dict[str, Any] = {}

    def bench(name: str) -> None:
        seconds, parts = (TINY_SECONDS, TINY_PARTS) if part.tiny else (SECONDS, ())
        given = make_bench(jax.devices()[:1], chip=this_chip().name, dtypes=() if part.tiny else DTYPES)
        report = run_bench(given, parts, seconds=seconds)
        show(report_text(report))
        found["rates"] = calibration_of(report)
        save_calibration(found["rates"], part.options.out / "rates.toml")
        part.keep("rates.toml has the rates", case=name, report=msgspec.to_builtins(report))

    part.each(["rates"], bench)
    shipped = rates_for(parse_cluster(f"{this_chip().name}:1"), None, fitted=True)
    errors: list[float] = []

    def compare(step: tuple[str, float, Any]) -> None:
        name, seconds, predict = step
        own, usual = predict(found["rates"]), predict(shipped)
        errors.append(abs(own / seconds - 1))
        part.keep(
            f"{name}: {seconds * 1e3:.2f} ms, predicted {own * 1e3:.2f} ({own / seconds - 1:+.0%}) by these rates, "
            f"{usual * 1e3:.2f} ({usual / seconds - 1:+.0%}) by the shipped ones",
            case=name, seconds=seconds, predicted_s=own, shipped_s=usual,
        )  # fmt: skip

    if "rates" in found:
        part.each(list(steps(part)), compare)
    worst = max(errors, default=0.0)
    part.close(
        f"{len(errors)} steps, at most {worst:.0%} off" if errors else "no steps to predict",
        bool(errors) and worst <= GOAL,
    )


if __name__ == "__main__":
    main()
