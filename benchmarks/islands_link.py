"""Four islands, each in a network namespace of its own, with links that are unlimited or have 10 Mbit/s in turn.

python -m benchmarks.islands_link                    about 12 minutes of two cores, as root on Linux
python -m benchmarks.islands_link --turns 1          a quick look

An island is a process of `meshwright train` with 0.4 core, whose only network is a veth pair to a bridge; `tc tbf`
limits what it sends and what it gets. The membership service runs outside. Islands exchange outer gradients every 30
steps in 4 bits beside 20 further steps, in float32 with and without overlap, and gradients in every step. Tokens/s are
from the end of one period to the end of a later one, in turns with and without the limit; bytes are of interfaces.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.elastic import CGROUPS, CONFIG, CORES, group

from meshwright.islands.member import ISLAND, ISLANDS, KEY, SERVICE
from meshwright.plan.plan_file import load_plan
from meshwright.spec.weights import num_params

COUNT, EVERY, OVERLAP, RATE = 4, 30, 20, "10mbit"
BRIDGE, SUBNET = "mwbridge", "10.77.0"
DILOCO: dict[str, Any] = {"islands_sync": "diloco", "outer_every": EVERY}
VARIANTS: dict[str, dict[str, Any]] = {
    "4 bits, overlap": {**DILOCO, "outer_bits": 4, "outer_overlap": OVERLAP},
    "fp32, overlap": {**DILOCO, "outer_overlap": OVERLAP},
    "fp32": DILOCO,
    "synchronous": {},
}
MOST_SHARE = {"4 bits, overlap": 1.2 / (8 * EVERY), "fp32": 1.05 / EVERY, "fp32, overlap": 1.05 / EVERY}
"""Most bytes between islands, of those of synchronous float32."""
LEAST_KEPT = 0.9
"""Least tokens/s with the limit, of those without, that 4 bits with overlap keep."""


class Measured(NamedTuple):
    """Tokens/s of each turn without and with the limit, and bytes that an island sends in a step: the median."""

    free_rates: list[float]
    limited_rates: list[float]
    bytes_per_step: float

    @property
    def kept(self) -> float:
        """The share of tokens/s that is left with the limit: that of the medians."""
        return statistics.median(self.limited_rates) / statistics.median(self.free_rates)


def run(*words: str) -> None:
    """Runs a command of the system."""
    subprocess.run(words, check=True)


class Network:
    """Namespaces mw0, mw1, ..., each with an interface to a bridge that has the address ``.1``."""

    def __enter__(self) -> "Network":
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for i in range(COUNT):
            run("ip", "netns", "add", f"mw{i}")
            run("ip", "link", "add", f"mwo{i}", "type", "veth", "peer", "name", f"mwi{i}", "netns", f"mw{i}")
            run("ip", "link", "set", f"mwo{i}", "master", BRIDGE, "up")
            inside = ("ip", "-n", f"mw{i}")
            run(*inside, "addr", "add", f"{SUBNET}.{i + 2}/24", "dev", f"mwi{i}")
            run(*inside, "link", "set", f"mwi{i}", "up")
            run(*inside, "link", "set", "lo", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for i in range(COUNT):
            subprocess.run(("ip", "netns", "del", f"mw{i}"), check=False)
        subprocess.run(("ip", "link", "del", BRIDGE), check=False)

    def limit(self, rate: str) -> None:
        """Limits every island's link, in both directions; "" ends the limit."""
        for i in range(COUNT):
            for place, device in ((("-n", f"mw{i}"), f"mwi{i}"), ((), f"mwo{i}")):
                if rate:
                    tbf = ("tbf", "rate", rate, "burst", "16kb", "latency", "200ms")
                    run("tc", *place, "qdisc", "replace", "dev", device, "root", *tbf)
                else:
                    words = ("tc", *place, "qdisc", "del", "dev", device, "root")
                    subprocess.run(words, check=False, stderr=subprocess.DEVNULL)

    def sent_bytes(self) -> int:
        """Returns the bytes that the busiest island has sent: what the other end of its pair received."""
        return max(int(Path(f"/sys/class/net/mwo{i}/statistics/rx_bytes").read_text()) for i in range(COUNT))


class Islands:
    """Islands that train by a plan until `stop`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.runs, self.said = folder / f"runs-{name}", folder / f"{name}.txt"
        with socket.create_server((f"{SUBNET}.1", 0)) as probe:
            port = probe.getsockname()[1]
        own = {SERVICE: f"{SUBNET}.1:{port}", KEY: "link", ISLANDS: str(COUNT)}
        env = {**os.environ, **own}
        service = (sys.executable, "-m", "meshwright.islands", own[SERVICE], json.dumps({"count": COUNT}))
        words = [sys.executable, "-m", "meshwright", "train", str(folder / f"{name}.toml"), "--steps", "1000000"]
        words += ["--runs", str(self.runs), "--set", "train.schedule=constant", "--set", "train.log_every=100000"]
        with self.said.open("wb") as said:
            self.children = [subprocess.Popen(service, env=env, stdout=said, stderr=said)]
            for i in range(COUNT):
                inside = ["nice", "-n", "-10", "ip", "netns", "exec", f"mw{i}", *words]
                self.children.append(subprocess.Popen(inside, env=env | {ISLAND: str(i)}, stdout=said, stderr=said))
                if CGROUPS:
                    (group(i) / "cgroup.procs").write_text(str(self.children[-1].pid))

    def last(self) -> tuple[int, int]:
        """Returns the last step, and the tokens so far."""
        for path in self.runs.glob("*/metrics.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                lines = file.read().split(b"\n")[:-1]
            if lines and lines[-1].startswith(b"{"):
                record = json.loads(lines[-1])
                return record["step"], record["tokens"]
        return 0, 0

    def until(self, step: int) -> tuple[float, int, int]:
        """Waits until a step is done; returns the time, the step and the tokens then."""
        while True:
            last_step, tokens = self.last()
            if last_step >= step:
                return time.monotonic(), last_step, tokens
            codes = [child.poll() for child in self.children]
            assert codes == [None] * len(codes), f"{codes} {self.said.read_text()[-3000:]}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends all."""
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()


def measured(network: Network, folder: Path, name: str, period: int, turns: int) -> Measured:
    """Runs a variant in turns with and without the limit."""
    islands = Islands(folder, name)
    rates: dict[str, list[float]] = {"": [], RATE: []}
    sent = []
    try:
        islands.until(2 * period)
        for _ in range(turns):
            for rate, few_s in (("", 15.0), (RATE, 20.0)):
                network.limit(rate)
                next_end = (islands.last()[0] // period + 2) * period  # the period of the change does not count
                begin, first_step, first_tokens = islands.until(next_end)
                first_bytes, end = network.sent_bytes(), begin
                while end - begin < few_s:
                    next_end += period
                    end, step, tokens = islands.until(next_end)
                rates[rate].append((tokens - first_tokens) / (end - begin))
                sent.append((network.sent_bytes() - first_bytes) / (step - first_step))
    finally:
        islands.stop()
        network.limit("")
    return Measured(rates[""], rates[RATE], statistics.median(sent))


def words_of(rates: list[float]) -> str:
    """Returns the median and the range of rates."""
    return f"{statistics.median(rates):6,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"


def main() -> None:
    """Runs all, and prints a line for each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns without and with the limit")
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as name, Network() as network:
        folder, by_name = Path(name), {}
        print(f"{COUNT} islands of {CORES} core" if CGROUPS else "no cgroups: islands are not limited", flush=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for variant, fields in VARIANTS.items():
            words = ["plan", str(folder / "config.json"), "--on", f"{COUNT}*cpu:1@10Mbit/s", "--batch", "32seq"]
            words += ["--seq", "128", "--set", "strategy.state=fp32", "-o", str(folder / f"{variant}.toml")]
            words += [word for field, value in fields.items() for word in ("--set", f"strategy.{field}={value}")]
            plan = [sys.executable, "-m", "meshwright", *words]
            subprocess.run(plan, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            period = fields.get("outer_every", 1)
            by_name[variant] = measured(network, folder, variant, period, turns)
            free, limited, sent = by_name[variant]
            print(
                f"{variant:15} {words_of(free)} tokens/s, at {RATE[:-4]} Mbit/s {words_of(limited)}: "
                f"{by_name[variant].kept:6.1%}; {sent:9,.0f} bytes a step from an island",
                flush=True,
            )
        num_weights = num_params(load_plan(folder / "synchronous.toml").model)
        formula = 2 * (COUNT - 1) / COUNT * 4 * num_weights
        synchronous = by_name["synchronous"].bytes_per_step
        print(f"{num_weights:,} weights: synchronous float32 sends {formula:,.0f} bytes a step by the formula")
        for variant, most in MOST_SHARE.items():
            share = by_name[variant].bytes_per_step / synchronous
            verdict = "met" if share <= most else "not met"
            print(f"{variant:16} bytes 1/{1 / share:.1f} of synchronous, at most 1/{1 / most:.1f}: {verdict}")
        kept = by_name["4 bits, overlap"].kept
        verdict = "met" if kept >= LEAST_KEPT else "not met"
        print(f"4 bits with overlap keep {kept:.1%} of the tokens/s, at least {LEAST_KEPT:.0%}: {verdict}")


if __name__ == "__main__":
    main()
