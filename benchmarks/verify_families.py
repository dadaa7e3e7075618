"""Training and services of newer families, compiled for absent chips: memory and collectives beside the prediction.

``python -m benchmarks.verify_families [--only PATTERN] [--out FILE]`` needs the extras tpu and gpu. `plan` chooses the
strategy and `service` the engines: the first of each, proved at partition depth. A service has two steps, decode and
prefill, which beside an encoder is the program that reads sources. Columns are those of `benchmarks.verify_serving`.
"""

import argparse
import datetime
import re
from collections.abc import Callable, Iterator

from benchmarks.verify import TIMEOUT_S, versions
from benchmarks.verify_serving import found_in, line

from meshwright.api.proving import ProofOptions, prove_service, prove_strategy
from meshwright.api.rates import rates_for
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import stored_dtypes
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import mesh_words
from meshwright.verify.proof import Proof

CHAT, SPEECH, TEXT = (
    Service(prompt_len=8192, output_len=512, tpot_s=0.1),
    Service(prompt_len=1500, output_len=200, tpot_s=0.1),
    Service(prompt_len=512, output_len=128, tpot_s=0.1),
)
CASES = (
    ("glm4.6", ("v5p:4x4x8", "h200:8x16"), (128, 4096), ("v5p:4x4x4", "h200:8x4"), CHAT),
    ("minimax-m2", ("v5p:4x4x8", "h100:8x16"), (128, 4096), ("v6e:4x8", "h100:8x4"), CHAT),
    ("t5-11b", ("v5e:4x4", "h100:8x1"), (64, 512), ("v5e:4x4", "h100:8x1"), TEXT),
    ("whisper-large-v3", ("v5e:4x4", "h100:8x1"), (256, 448), ("v5e:4x4", "h100:8x1"), SPEECH),
    ("gemma3n-e4b", ("v5e:4x4", "h100:8x1"), (32, 4096), ("v5e:4x4", "h100:8x1"), CHAT),
    ("gemma4-31b", ("v5p:4x4x4", "h100:8x8"), (128, 4096), ("v6e:4x4", "h100:8x1"), CHAT),
    ("gemma4-e4b", ("v5e:4x4", "h100:8x1"), (32, 4096), ("v5e:4x4", "h100:8x1"), CHAT),
    ("llama4-scout", ("v5p:4x4x8", "h100:8x16"), (128, 8192), ("v5p:4x4x4", "h100:8x4"), CHAT),
)
"""Model; clusters that train it, sequences of a step and their length; clusters that serve it, and the requests."""

SERVED_DTYPES = ("bf16", "int8")


def trained(model: str, cluster: str, batch_seqs: int, seq_len: int) -> Iterator[tuple[str, str, str, Proof]]:
    """Yields the chips, the step, the strategy and the proof of the first plan."""
    chips = parse_cluster(cluster)
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    setting = Setting(load_model(model), chips, job, rates_for(chips, None, fitted=True))
    strategy = rank_plans(setting).plans[0].strategy
    words = f"{mesh_words(strategy.mesh)}; {strategy.num_microbatches} mb, {strategy.remat}"
    yield chips.short_name, "train", words, prove_strategy(setting, strategy, ProofOptions(timeout_s=TIMEOUT_S))


def served(model: str, cluster: str, service: Service) -> Iterator[tuple[str, str, str, Proof]]:
    """Yields the part, the step, the engine and the proof of both steps of the first plan."""
    chips = parse_cluster(cluster)
    setting = service_setting(load_model(model), chips, rates_for(chips, None, fitted=True))
    stored = stored_dtypes(SERVED_DTYPES, SERVED_DTYPES, chip=chips.chip)
    plan = plan_service(setting, service, stored=stored).plans[0]
    for phase, proof in prove_service(plan, options=ProofOptions(timeout_s=TIMEOUT_S)).items():
        pool = plan.pool(phase)
        words = f"{mesh_words(pool.strategy.mesh)}; {pool.batch_seqs} seqs, {plan.stored.words}"
        yield pool.part.short_name, phase, words, proof


def proofs(only: str) -> Iterator[tuple[str, str, str, str, Proof]]:
    """Yields the model, the chips, the step, how it is split and the proof of every case whose name has a pattern."""
    for model, training_clusters, job, serving_clusters, service in CASES:
        for cluster in training_clusters:
            if re.search(only, f"{model} {cluster} train"):
                yield from ((model, *case) for case in trained(model, cluster, *job))
        for cluster in serving_clusters:
            if re.search(only, f"{model} {cluster} service"):
                yield from ((model, *case) for case in served(model, cluster, service))


def run(only: str, say: Callable[[str], None]) -> None:
    """Plans, compiles and says what was found."""
    results = []
    say(line(("model", "part", "step", "strategy", "GB", "memory", "arrays", "bytes", "unnamed", "names")))
    for model, chips, step, words, proof in proofs(only):
        found = found_in(proof)
        results.append(found)
        if found is None or proof.memory is None:
            cells = ("-", "-", "-", "-", "-", (proof.refusal or proof.traffic_error)[:200])
        else:
            names = ", ".join((*found.names, *(() if proof.memory.fits else ("DOES NOT FIT",))))
            numbers = f"{found.memory:+.1%}", f"{found.arrays:+.1%}", f"{found.sent:+.1%}", f"{found.unnamed:.1%}"
            cells = (f"{proof.memory.needed / 1e9:.1f}", *numbers, names)
        say(line((model, chips, step, words, *cells)))
    good = [found for found in results if found is not None]
    say("")
    say(
        f"{len(good)} of {len(results)} compiled; memory within 5% on "
        f"{sum(abs(found.memory) <= 0.05 for found in good)}, worst "
        f"{max((found.memory for found in good), key=abs, default=0.0):+.1%}; at most 2% of bytes without a name on "
        f"{sum(found.unnamed <= 0.02 for found in good)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help='a pattern found in "MODEL CLUSTER train" or "MODEL CLUSTER service"'
    )
    parser.add_argument("--out")
    asked = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    say(f"{datetime.date.today().isoformat()}, {versions()}, partition depth")
    run(asked.only, say)
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
