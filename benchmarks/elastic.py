"""Four islands of 0.4 core each train while something fails every 30 seconds on average.

python -m benchmarks.elastic                        15 minutes with faults, 5 without, and three seeds on one device
python -m benchmarks.elastic --minutes 2 --every 10 --calm 0.7

A fault is a killed process, a stopped one (it goes on after 6 s) or cut connections, of an island or of the membership
service, drawn at random. As root on Linux cgroups limit each process to 0.4 core (else the cores of the dead speed up
the living), and `ss -K` cuts connections; elsewhere it says what it goes without. Steps are seen in the run's
metrics.jsonl within 5 ms.

With --require it ends with 1 unless every fault is over in 10 s, all islands are back in 60 s, and tokens
are above 60% (two minutes on a busy machine; the figures of 15 minutes are in benchmarks/results).
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.islands.service import Bounds
from meshwright.simulate.fleet.fleet import Fault as SimulatedFault
from meshwright.simulate.fleet.fleet import TrainingFleet
from meshwright.simulate.fleet.outcome import simulate_faults
from meshwright.spec.faults.rates import FaultTimes, load_rates

ISLANDS, CORES, STOPPED_S = 4, 0.4, 6.0
BATCH, TOKENS = ["--batch", "32seq", "--seq", "128"], 32 * 128
SETTINGS = ["--set", "train.schedule=constant", "--set", "train.log_every=1000"]
CGROUP = Path("/sys/fs/cgroup/cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
CGROUPS = os.access(CGROUP / "cgroup.procs", os.W_OK)
CUTS = os.geteuid() == 0 and shutil.which("ss") is not None
KINDS = ("kill", "stop", "cut") if CUTS else ("kill", "stop")
MOST_WAIT_S, MOST_BACK_S, LEAST_SHARE = 10.0, 60.0, 0.6


class Fault(NamedTuple):
    """A fault: seconds since the start, what was done to which island (-1: the service), and when steps went on."""

    at: float
    kind: str
    island: int
    next_step_s: float
    back_s: float | None


class Elastic:
    """One run of islands under `launch --elastic`, whose processes are found by their environment."""

    def __init__(self, folder: Path, *, seed: int, name: str) -> None:
        self.folder, self.name, self.seed = folder, name, seed
        self.runs = folder / f"runs-{name}"
        self.limited: set[int] = set()
        words = [sys.executable, "-m", "meshwright", "launch", "-n", str(ISLANDS), "--elastic", "--devices", "1", "--"]
        words += [
            "train",
            str(folder / "plan.toml"),
            "--steps",
            "100000",
            "--seed",
            str(seed),
            "--runs",
            str(self.runs),
            *SETTINGS,
        ]
        self.said = (folder / f"{name}.txt").open("wb")
        self.child = subprocess.Popen(words, stderr=self.said, stdout=self.said, cwd=folder)
        self.began = time.monotonic()

    def processes(self) -> dict[int, int]:
        """Returns the process of each island, and of the service under -1; limits those that are new."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                variables = dict(v.split(b"=", 1) for v in path.read_bytes().split(b"\0") if b"=" in v)
                command = (path.parent / "cmdline").read_bytes()
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                pid = int(path.parent.name)
                if parent != self.child.pid or b"MESHWRIGHT_KEY" not in variables:
                    continue
                island = int(variables[b"MESHWRIGHT_ISLAND"]) if b"MESHWRIGHT_ISLAND" in variables else -1
                if island >= 0 or b"islands" in command:
                    found[island] = pid
                    if CGROUPS and pid not in self.limited and island >= 0:
                        (group(island) / "cgroup.procs").write_text(str(pid))
                        self.limited.add(pid)
        return found

    def records(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics by step, later ones for earlier."""
        by_step = {}
        for path in self.runs.glob("*/metrics.jsonl"):
            for line in path.read_bytes().split(b"\n")[:-1]:
                record = json.loads(line)
                by_step[record["step"]] = record
        return [by_step[step] for step in sorted(by_step)]

    def last_step(self) -> int:
        """Returns the newest step, by the end of the file."""
        for path in self.runs.glob("*/metrics.jsonl"):
            with suppress(OSError, ValueError):
                lines = path.read_bytes()[-4000:].split(b"\n")[:-1]
                return int(json.loads(lines[-1])["step"]) if lines else 0
        return 0

    def wait_for_step(self, step: int, most_s: float) -> float:
        """Returns the seconds until the run has done more than ``step`` steps, at most ``most_s``."""
        start = time.monotonic()
        while self.last_step() <= step and time.monotonic() - start < most_s:
            time.sleep(0.005)
        return time.monotonic() - start

    def present(self) -> int:
        """Returns the islands that took part in the newest step."""
        for path in self.runs.glob("*/metrics.jsonl"):
            with suppress(OSError, ValueError, IndexError):
                return len(json.loads(path.read_bytes()[-4000:].split(b"\n")[-2])["islands"])
        return 0

    def stop(self) -> None:
        """Ends the run: asks first."""
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(90)
        except subprocess.TimeoutExpired:
            self.child.kill()
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.said.close()


def group(island: int) -> Path:
    """Returns the cgroup of an island, with its limit."""
    folder = CGROUP / f"meshwright-elastic-{island}"
    if not folder.exists():
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(CORES * 100000)))
    return folder


def inject(run: Elastic, kind: str, pid: int) -> None:
    """Does a fault to a process."""
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        text = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            if f"pid={pid}," in line:
                port = line.split()[3].rpartition(":")[2]
                subprocess.run(["ss", "-K", "sport", "=", f":{port}"], capture_output=True, check=False)


def one_fault(run: Elastic, draw: random.Random) -> Fault | None:
    """Does a fault, waits for the next step and for all islands to be back."""
    processes = run.processes()
    island, kind = draw.choice([-1, *range(ISLANDS)]), draw.choice(KINDS)
    if island not in processes:
        return None
    step, start = run.last_step(), time.monotonic()
    inject(run, kind, processes[island])
    next_step_s = run.wait_for_step(step + 1, 60.0)  # the next may have been done already
    resumed = kind != "stop"
    back_s = None
    while time.monotonic() - start < 60:
        if not resumed and time.monotonic() - start > STOPPED_S:
            with suppress(ProcessLookupError):
                os.kill(processes[island], signal.SIGCONT)
            resumed = True
        run.processes()
        if resumed and run.present() == ISLANDS and time.monotonic() - start > next_step_s + 0.5:
            back_s = time.monotonic() - start
            break
        time.sleep(0.05)
    return Fault(start - run.began, kind, island, next_step_s, back_s)


def calm(run: Elastic, seconds: float) -> tuple[int, float]:
    """Lets a run train for so long after its first steps; returns its tokens and seconds."""
    first, begin = warm(run)
    while time.monotonic() - begin < seconds:
        run.processes()
        time.sleep(0.2)
    return run.records()[-1]["tokens"] - first, time.monotonic() - begin


def time_of_a_start(run: Elastic) -> float:
    """Kills an island, and returns the seconds until it is back: what the simulation is told."""
    begin = time.monotonic()
    inject(run, "kill", run.processes()[1])
    while run.present() == ISLANDS:
        time.sleep(0.02)
    while run.present() < ISLANDS:
        run.processes()
        time.sleep(0.02)
        assert time.monotonic() - begin < 60, (run.folder / f"{run.name}.txt").read_text()[-3000:]
    return time.monotonic() - begin


def simulated(faults: list["Fault"], seconds: float, step_s: float, start_s: float) -> float:
    """Returns the share of work that the simulation of the same faults keeps."""
    none = dict.fromkeys(("swap_s", "prep_s", "startup_s", "data_s", "restore_s", "copy_s", "save_s"), 0.0)
    times = FaultTimes(detect_s=0.1, hang_s=Bounds(count=ISLANDS).beat_s, init_s=start_s, regroup_s=0.05, **none)
    steps = max(1, round(seconds / step_s))
    fleet = TrainingFleet(
        num_chips=ISLANDS, num_hosts=ISLANDS, num_replicas=ISLANDS, step_s=step_s, rates=load_rates("llama3"),
        times=times, checkpoint_steps=steps,
    )  # fmt: skip
    kinds = {"kill": "process", "cut": "link", "stop": "hang"}
    known = [SimulatedFault(f.at, f.island, kinds[f.kind]) for f in faults if f.island >= 0]  # type: ignore[arg-type]
    return simulate_faults(fleet, "elastic", known, duration_s=seconds).goodput.mean


def warm(run: Elastic) -> tuple[int, float]:
    """Waits for the first steps of all islands; returns the tokens so far, and the time."""
    while run.last_step() < 20 or run.present() < ISLANDS:
        run.processes()
        time.sleep(0.05)
        assert run.child.poll() is None, (run.folder / f"{run.name}.txt").read_text()[-3000:]
    return run.records()[-1]["tokens"], time.monotonic()


def require_accounted(records: list[dict[str, Any]]) -> int:
    """Returns the number of samples; raises AssertionError for one that is lost or was taken twice."""
    taken = [
        n
        for r in records
        for block in r["islands"].values()
        for first, count in block
        for n in range(first, first + count)
    ]
    assert len(taken) == len(set(taken)), "a sample was taken twice"
    missing = set(range(max(taken) + 1)) - set(taken)
    assert len(missing) <= 4 * ISLANDS, f"{len(missing)} samples are missing"  # those postponed by the last fault
    return len(taken)


def main() -> None:
    """Runs both, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--calm", type=float, default=5.0, help="minutes without a fault")
    parser.add_argument("--every", type=float, default=30.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds, this one first, whose losses without a fault are shown"
    )
    parser.add_argument("--require", action="store_true", help="end with 1 unless the bounds hold")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    print(
        "" if CGROUPS else "no cgroups: islands are not limited; ",
        end="" if CUTS else "no ss: connections are not cut\n",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        words = ["plan", str(folder / "config.json"), "--on", "4*cpu:1@10Gbit/s", *BATCH]
        words += ["--set", "strategy.state=fp32", "-o", str(folder / "plan.toml")]
        subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, stdout=subprocess.DEVNULL)
        run = Elastic(folder, seed=given.seed, name="calm")
        calm_tokens, calm_s = calm(run, given.calm * 60)
        start_s = time_of_a_start(run)
        run.stop()
        losses = {"no fault": losses_by_tokens(run.records())}
        run = Elastic(folder, seed=given.seed, name="faults")
        first, begin = warm(run)
        faults: list[Fault] = []
        due = begin + draw.expovariate(1 / given.every)
        while time.monotonic() - begin < given.minutes * 60:
            run.processes()
            if time.monotonic() >= due:
                fault = one_fault(run, draw)
                faults += [fault] if fault else []
                due = max(due + draw.expovariate(1 / given.every), time.monotonic())
            time.sleep(0.1)
        records = run.records()
        seconds = time.monotonic() - begin
        run.stop()
        offset = begin - run.began
        losses["faults"] = losses_by_tokens(run.records())
        report(faults, records, run.records(), first, seconds, calm_tokens / calm_s)
        step_s = TOKENS / (calm_tokens / calm_s)
        share = simulated([f._replace(at=f.at - offset) for f in faults], seconds, step_s, start_s)
        real = (records[-1]["tokens"] - first) / seconds / (calm_tokens / calm_s)
        print(f"goodput simulated with the same faults, a start taking {start_s:.1f} s: {share:.1%}, real {real:.1%}")
        is_bad = (
            any(f.next_step_s > MOST_WAIT_S or (f.back_s or 1e9) > MOST_BACK_S for f in faults) or real < LEAST_SHARE
        )
        losses |= calm_seeds(folder, [given.seed + n for n in range(given.seeds)], max(losses["faults"]) // TOKENS)
        report_losses(losses)
        if os.environ.get("KEEP") or (given.require and is_bad):
            print((folder / "faults.txt").read_text()[-6000:])
        if given.require and is_bad:
            sys.exit("not within the bounds")


def report(
    faults: list[Fault],
    records: list[dict[str, Any]],
    all_records: list[dict[str, Any]],
    first: int,
    seconds: float,
    calm_rate: float,
) -> None:  # fmt: skip
    """Prints what was measured beside what is asked."""
    tokens = records[-1]["tokens"] - first
    taken = require_accounted(all_records)
    measured = [r for r in records if r["tokens"] > first]
    live = sum(len([b for b in r["islands"].values() if b]) * r["step_s"] for r in measured) / ISLANDS
    print(f"{len(faults)} faults in {seconds:.0f} s, one in {seconds / max(1, len(faults)):.0f} s")
    for kind in KINDS:
        waits = [fault.next_step_s for fault in faults if fault.kind == kind and fault.island >= 0]
        if waits:
            text = f"{statistics.median(waits):.2f} s median, {max(waits):.2f} s worst"
            print(f"  {kind} of an island, {len(waits)}: to the next step {text}")
    waits = [fault.next_step_s for fault in faults if fault.island < 0]
    if waits:
        print(
            f"  of the service, {len(waits)}: to the next step {statistics.median(waits):.2f} s, {max(waits):.2f} worst"
        )
    backs = [fault.back_s for fault in faults]
    known = [back for back in backs if back is not None]
    print(f"  all islands back after {statistics.median(known or [0]):.1f} s median, {max(known or [0]):.1f} s worst; "
          f"not within 60 s: {backs.count(None)}")  # fmt: skip
    share = tokens / seconds / calm_rate
    print(f"tokens/s {tokens / seconds:,.0f}, without faults {calm_rate:,.0f}: {share:.1%}; "
          f"for each second of a live island {tokens / live / ISLANDS * ISLANDS / calm_rate:.1%}")  # fmt: skip
    print(f"samples: {taken} taken, each once, none missing")


def losses_by_tokens(records: list[dict[str, Any]]) -> dict[int, float]:
    """Returns the loss of each step by the tokens that the run had seen after it."""
    return {record["tokens"]: record["loss"] for record in records}


def calm_seeds(folder: Path, seeds: list[int], num_steps: int) -> dict[str, dict[int, float]]:
    """Trains the same batches on one device with each seed, without a fault, and returns their losses."""
    losses = {}
    words = ["plan", str(folder / "config.json"), "--on", "cpu:1", *BATCH, "-o", str(folder / "one.toml")]
    subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, stdout=subprocess.DEVNULL)
    for seed in seeds:
        runs = folder / f"seed-{seed}"
        words = ["train", str(folder / "one.toml"), "--steps", str(num_steps), "--seed", str(seed), "--runs", str(runs)]
        subprocess.run([sys.executable, "-m", "meshwright", *words, *SETTINGS], check=True, capture_output=True)
        (path,) = runs.glob("*/metrics.jsonl")
        losses[f"seed {seed}"] = losses_by_tokens([json.loads(line) for line in path.read_text().splitlines()])
    return losses


def report_losses(losses: dict[str, dict[int, float]]) -> None:
    """Prints each run's mean loss over the 50 steps before 1, 2, 4, ... thousand steps' worth of tokens."""
    last = max(losses["faults"])
    for num_steps in [1000 * 2**n for n in range(20) if 1000 * 2**n * TOKENS < last] + [last // TOKENS]:
        means = {
            name: statistics.mean(loss for count, loss in by_tokens.items() if 0 <= num_steps - count / TOKENS < 50)
            for name, by_tokens in losses.items()
            if max(by_tokens) >= num_steps * TOKENS
        }
        print(f"loss after {num_steps * TOKENS:,} tokens:", ", ".join(f"{n} {mean:.3f}" for n, mean in means.items()))


if __name__ == "__main__":
    main()
