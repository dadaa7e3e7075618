"""Steps predicted from rates of this machine beside the same steps measured.

    python benchmarks/self_accuracy.py [--cases NAME ...] [--rounds N] [--out FILE]

For every number of emulated devices a process measures the machine as `meshwright plan` does, and runs the cases of
that number: the real step on random tokens. Processes take turns, and reference steps and cases are interleaved,
because a shared machine is up to a quarter slower in some minutes than in others. No case has the shapes of the
reference steps, and no number is fitted to the cases. The first twelve showed where the model was wrong; the rest were
chosen after it.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET, LEAST_CASES = 0.12, 8
WARMUP_STEPS, ROUNDS, STEPS_A_ROUND = 6, 10, 3
"""Of the steps of a round the first is left out: another case's data are in the caches."""

DENSE = {"family": "llama", "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "vocab_size": 2048}
EXPERTS = {**DENSE, "family": "mixtral", "num_experts": 8, "experts_per_token": 2, "d_ff": 320, "d_ff_expert": 320}

CASES: dict[str, dict[str, Any]] = {
    "fsdp8": {
        "devices": 8,
        "model": {**DENSE, "num_layers": 4, "d_model": 288, "d_ff": 800},
        "mesh": {"fsdp": 8},
        "remat": "none",
        "batch": (32, 128),
    },
    "fsdp4-tensor2": {
        "devices": 8,
        "model": {**DENSE, "num_layers": 6, "d_model": 192, "d_ff": 512, "num_heads": 6, "num_kv_heads": 2},
        "mesh": {"fsdp": 4, "tensor": 2},
        "remat": "block",
        "batch": (32, 192),
    },
    "data2-fsdp2-tensor2": {
        "devices": 8,
        "model": {**DENSE, "num_layers": 3, "d_model": 384, "d_ff": 1024, "num_heads": 12, "num_kv_heads": 12},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "remat": "selective",
        "batch": (32, 96),
        "microbatches": 2,
    },
    "experts": {
        "devices": 8,
        "model": {**EXPERTS, "num_layers": 3, "d_model": 192},
        "mesh": {"fsdp": 2, "expert": 4},
        "remat": "block",
        "batch": (16, 128),
    },
    "vocabulary": {
        "devices": 4,
        "model": {**DENSE, "num_layers": 2, "d_model": 224, "d_ff": 608, "vocab_size": 24576},
        "mesh": {"fsdp": 4},
        "remat": "none",
        "batch": (16, 128),
    },
    "tensor4": {
        "devices": 4,
        "model": {**DENSE, "num_layers": 4, "d_model": 320, "d_ff": 896, "head_dim": 40},
        "mesh": {"tensor": 4},
        "remat": "full",
        "batch": (16, 160),
    },
    "pipeline2-fsdp2": {
        "devices": 4,
        "model": {**DENSE, "num_layers": 8, "d_model": 240, "d_ff": 640},
        "mesh": {"pipeline": 2, "fsdp": 2},
        "remat": "block",
        "batch": (32, 128),
        "microbatches": 4,
    },
    "deep": {
        "devices": 2,
        "model": {**DENSE, "num_layers": 20, "d_model": 160, "d_ff": 448, "num_heads": 5, "num_kv_heads": 5},
        "mesh": {"data": 2},
        "remat": "none",
        "batch": (8, 224),
    },
    "few-kv-heads": {
        "devices": 2,
        "model": {**DENSE, "num_layers": 4, "d_model": 320, "d_ff": 832, "num_heads": 10, "num_kv_heads": 1},
        "mesh": {"fsdp": 2},
        "remat": "selective",
        "batch": (4, 512),
    },
    "one-wide": {
        "devices": 1,
        "model": {
            **DENSE,
            "num_layers": 2,
            "d_model": 640,
            "d_ff": 1792,
            "num_heads": 10,
            "head_dim": 64,
            "num_kv_heads": 5,
        },
        "mesh": {},
        "remat": "none",
        "batch": (8, 192),
    },
    "one-deep": {
        "devices": 1,
        "model": {**DENSE, "num_layers": 10, "d_model": 208, "d_ff": 576},
        "mesh": {},
        "remat": "block",
        "batch": (8, 320),
    },
    "one-microbatches": {
        "devices": 1,
        "model": {**DENSE, "num_layers": 4, "d_model": 352, "d_ff": 960, "vocab_size": 4096},
        "mesh": {},
        "remat": "full",
        "batch": (16, 144),
        "microbatches": 4,
    },
}


LATER: dict[str, dict[str, Any]] = {
    "fsdp8-full": {
        "devices": 8,
        "model": {**DENSE, "num_layers": 5, "d_model": 224, "d_ff": 640},
        "mesh": {"fsdp": 8},
        "remat": "full",
        "batch": (16, 160),
    },
    "experts-unsaved": {
        "devices": 8,
        "model": {**EXPERTS, "num_layers": 2, "d_model": 160, "d_ff": 256, "d_ff_expert": 256},
        "mesh": {"fsdp": 4, "expert": 2},
        "remat": "none",
        "batch": (8, 192),
    },
    "data2-tensor2": {
        "devices": 4,
        "model": {**DENSE, "num_layers": 3, "d_model": 304, "d_ff": 848},
        "mesh": {"data": 2, "tensor": 2},
        "remat": "none",
        "batch": (16, 96),
        "microbatches": 2,
    },
    "context2-fsdp2": {
        "devices": 4,
        "model": {**DENSE, "num_layers": 4, "d_model": 272, "d_ff": 736},
        "mesh": {"fsdp": 2, "context": 2},
        "remat": "block",
        "batch": (4, 384),
    },
    "fsdp2": {
        "devices": 2,
        "model": {**DENSE, "num_layers": 6, "d_model": 272, "d_ff": 720, "num_kv_heads": 2},
        "mesh": {"fsdp": 2},
        "remat": "block",
        "batch": (6, 320),
    },
    "one-long": {
        "devices": 1,
        "model": {**DENSE, "num_layers": 3, "d_model": 240, "d_ff": 672, "num_kv_heads": 2},
        "mesh": {},
        "remat": "none",
        "batch": (3, 768),
    },
    "one-selective": {
        "devices": 1,
        "model": {**DENSE, "num_layers": 3, "d_model": 480, "d_ff": 1312, "head_dim": 48, "vocab_size": 6144},
        "mesh": {},
        "remat": "selective",
        "batch": (8, 224),
    },
}
"""Cases that were chosen after the model had been changed in view of the others."""

CASES |= LATER


# -- the process of one number of devices ------------------------------------------------------------------


class Child:
    """Measures the machine as so many devices, prices cases and runs their steps."""

    def __init__(self, devices: int) -> None:
        from meshwright.core.host_memory import keep_freed_memory
        from meshwright.parallel.mesh import emulate_devices

        keep_freed_memory()
        emulate_devices(devices)
        self.devices = devices
        self.calibration: Any = None
        self.references: Any = None
        self.traces = tempfile.TemporaryDirectory()
        self.runs: dict[str, Callable[[], float]] = {}

    def measure(self) -> None:
        """Measures the rates outside a step, and compiles the reference steps."""
        from meshwright.bench.machine import measure_machine
        from meshwright.bench.machine_step import REFERENCES, RunningStep

        self.calibration = measure_machine(self.devices)
        traces = Path(self.traces.name)
        self.references = [RunningStep(one, self.devices, traces / one.model.name) for one in REFERENCES]

    def profile(self, number: int) -> None:
        """Profiles the reference steps once more."""
        for step in self.references:
            step.profile(number)

    def rates(self) -> dict[str, Any]:
        """Returns the rates of the machine from all rounds."""
        import msgspec

        from meshwright.bench.machine_step import host_rates

        measured = [step.measured(self.calibration) for step in self.references]
        self.calibration = msgspec.structs.replace(self.calibration, host=host_rates(measured))
        return dict(msgspec.to_builtins(self.calibration))

    def predict(self, name: str) -> float:
        """Seconds of a step of a case that `meshwright plan` expects."""
        from meshwright.cost.setting import Setting
        from meshwright.cost.train_step import estimate_step

        model, cluster, job, strategy = parts_of(name)
        return float(estimate_step(Setting(model, cluster, job, self.calibration), strategy).step_s)

    def prepare(self, name: str) -> float:
        """A case compiled and warm; the seconds that its last step took."""
        self.runs[name] = stepper(name)
        return [self.runs[name]() for _ in range(WARMUP_STEPS)][-1]

    def run(self, name: str, steps: int) -> list[float]:
        """Seconds of so many further steps."""
        return [self.runs[name]() for _ in range(steps)]


def parts_of(name: str) -> tuple[Any, Any, Any, Any]:
    """Model, cluster, job and strategy of a case."""
    from meshwright.spec.cluster import parse_cluster
    from meshwright.spec.job import Job
    from meshwright.spec.model import Model
    from meshwright.spec.strategy import Strategy, make_mesh

    case = CASES[name]
    rows, length = case["batch"]
    return (
        Model(name=name, **case["model"]),
        parse_cluster(f"cpu:{case['devices']}"),
        Job(batch_seqs=rows, seq_len=length),
        Strategy(
            mesh=make_mesh(case["mesh"]),
            remat=case["remat"],
            state="fp32",
            num_microbatches=case.get("microbatches", 1),
        ),
    )


def stepper(name: str) -> Callable[[], float]:
    """A call that runs the next step of a case and gives its seconds."""
    import jax

    from meshwright.profile.subjects import random_rows
    from meshwright.train.settings import program_options, settings_from_table
    from meshwright.train.step import make_step

    model, _, job, strategy = parts_of(name)
    settings = settings_from_table({})
    options = program_options(settings, strategy, several_documents=False)
    step = make_step(model, strategy, settings, options=options)
    states = [step.init(0)]
    batch = step.place(random_rows(step, job, seed=0))
    compiled = step.compile.lower(states[0], batch).compile()

    def run() -> float:
        start = time.perf_counter()
        states[0], metrics = compiled(states[0], batch)
        jax.block_until_ready((states[0], metrics))
        return time.perf_counter() - start

    return run


def serve(devices: int) -> None:
    """Answers lines of JSON, [method, arguments ...], with a line of JSON each."""
    child = Child(devices)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(child, method)(*arguments)), flush=True)


class Remote:
    """A child in a process of its own."""

    def __init__(self, devices: int) -> None:
        command = [sys.executable, __file__, "--serve", str(devices)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([method, *arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process for {method} {arguments} ended early, see its error above")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


# -- the whole benchmark -----------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> None:
    """Measure the machine, run all cases in turns, print and write the table."""
    names = [name for name in CASES if not arguments.cases or name in arguments.cases]
    start = time.perf_counter()
    loads: list[float] = []
    children = {devices: Remote(devices) for devices in sorted({CASES[name]["devices"] for name in names})}

    def of(name: str) -> Remote:
        return children[CASES[name]["devices"]]

    try:
        for devices, child in children.items():
            say(f"measuring the machine as cpu:{devices}")
            child("measure")
            loads.append(os.getloadavg()[0])
        for name in names:
            last_s = of(name)("prepare", name)
            say(f"{name}: step {WARMUP_STEPS} took {last_s:.3f} s")
            loads.append(os.getloadavg()[0])
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}")
            for child in children.values():
                child("profile", number)
            for name in names:
                seconds[name] += of(name)("run", name, STEPS_A_ROUND)[1:]
            loads.append(os.getloadavg()[0])
        rates = {devices: child("rates") for devices, child in children.items()}
        predicted = {name: of(name)("predict", name) for name in names}
    finally:
        for child in children.values():
            child.close()
    lines = [*heading(loads, time.perf_counter() - start), *table(predicted, seconds), *described(rates)]
    print("\n".join(lines))
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.keep:
        kept = {"predicted": predicted, "seconds": seconds, "rates": rates}
        arguments.keep.write_text(json.dumps(kept), encoding="utf-8")


def say(line: str) -> None:
    """How far the benchmark is."""
    print(line, file=sys.stderr, flush=True)


def table(predicted: dict[str, float], seconds: dict[str, list[float]]) -> list[str]:
    """A row for every case, and the mean and the largest error.

    The measured step is the median of the faster half, which the rates are too: a busy machine makes steps slower,
    never faster. The error against the median of all steps is a line of its own.
    """
    rows = [f"{'case':<22}{'predicted':>11}{'measured':>11}{'ratio':>8}{'quartiles':>20}"]
    errors, errors_of_all = {}, []
    for name, times in seconds.items():
        measured = statistics.median(sorted(times)[: (len(times) + 1) // 2])
        low, _, high = statistics.quantiles(times, n=4)
        ratio = predicted[name] / measured
        errors[name] = abs(ratio - 1)
        errors_of_all.append(abs(predicted[name] / statistics.median(times) - 1))
        spread = f"{low * 1e3:.0f} to {high * 1e3:.0f} ms"
        rows.append(f"{name:<22}{predicted[name] * 1e3:>8.0f} ms{measured * 1e3:>8.0f} ms{ratio:>8.2f}{spread:>20}")
    later = [error for name, error in errors.items() if name in LATER]
    worst = max(errors, key=lambda name: errors[name])
    mean = statistics.mean(errors.values())
    verdict = "reached" if mean <= TARGET else "missed"
    if len(errors) < LEAST_CASES:
        verdict = f"for {LEAST_CASES} cases, these are {len(errors)}"
    rows.append(f"mean absolute error {mean:.1%} (target {TARGET:.0%}: {verdict}), worst {errors[worst]:.1%}, {worst}")
    rows.append(f"against the median of all steps: {statistics.mean(errors_of_all):.1%}")
    if later:
        rows.append(f"of those that were chosen after the model: {statistics.mean(later):.1%} of {len(later)}")
    return rows


def heading(loads: list[float], seconds: float) -> list[str]:
    """What ran, where and when."""
    from importlib.metadata import version

    return [
        f"python benchmarks/self_accuracy.py, {datetime.date.today()}, {seconds:.0f} s",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {version('jax')}",
        f"load of the machine while it ran: {min(loads):.1f} to {max(loads):.1f} (one process of ours at a time)",
        "",
    ]


def rate(seconds: float) -> str:
    """Billions a second, from the seconds of one; no time was seen to go to some."""
    return f"{1e-9 / seconds:.1f}" if seconds > 1e-15 else "any"


def described(rates: dict[int, dict[str, Any]]) -> list[str]:
    """The main rates of each measurement, and the cases."""
    rows = ["", "rates of a device"]
    for devices, one in rates.items():
        product, host = one["host"]["product"], one["host"]
        streams, loops = rate(host["stream"]["byte"]), rate(host["loop_byte"])
        products = (
            f"{rate(product['flop'])} GFLOP/s and {rate(product['byte'])} GB/s, {product['call'] * 1e6:.0f} us a call"
        )
        rows.append(f"  cpu:{devices}: products {products}; others {streams}, loops {loops} GB/s")
    rows += ["", "cases"]
    for name, case in CASES.items():
        model, (batch, length) = case["model"], case["batch"]
        mesh = " ".join(f"{axis} {size}" for axis, size in case["mesh"].items()) or "1 device"
        sizes = f"L {model['num_layers']}, D {model['d_model']}, F {model['d_ff']}, V {model['vocab_size']}"
        heads = f"N {model['num_heads']}, K {model['num_kv_heads']}, H {model['head_dim']}"
        rows.append(f"  {name}: {sizes}, {heads}")
        micro = case.get("microbatches", 1)
        rows.append(f"    {mesh}, remat {case['remat']}, {batch} x {length} tokens, {micro} microbatch(es)")
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results" / f"self_accuracy-{datetime.date.today()}.txt"
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), help="only these")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {STEPS_A_ROUND} steps of every case")
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--keep", type=Path, help="also write every time and rate here, as JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    if given.serve:
        serve(given.serve)
    else:
        main(given)
