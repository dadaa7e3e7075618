"""Collective matmuls beside the plain form (the collective, then the product) and the product on one device.

python benchmarks/collective_matmul.py               4 emulated devices of this machine, or the accelerators it has
python benchmarks/collective_matmul.py --devices 2   so many
python benchmarks/collective_matmul.py --quick       smaller arrays, fewer rounds
python benchmarks/collective_matmul.py --json        the figures alone, as JSON

AllGather-matmul, matmul-ReduceScatter and matmul-AllReduce (its sum cut along positions, or along the last dim) by
themselves, as derived and run by the product, and a whole training step of one llama layer, forward and backward.
Results are first held against one device's. The contestants take turns; a ratio is of the same round, the median of
all rounds is shown.
Devices emulated on a CPU share its cores, and communication is copying by those same cores: nothing overlaps there.
What the figures show is what blocks cost by themselves, smaller products and more copies; what they hide on links of
their own needs accelerators that have such links.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

PLAIN = "plain"
WAYS = ("none", "one-way", "two-way")
NAMES = {"none": PLAIN, "one-way": "one-way", "two-way": "two-way"}
FORMS = {
    "AllGather": ("x[B,T_tensor,D] * w[D,F_tensor] -> y[B,T,F_tensor]", "T"),
    "ReduceScatter": ("x[B,T,F_tensor] * w[F_tensor,D] -> y[B,T_tensor,D]", "T"),
    "AllReduce": ("x[B,T,F_tensor] * w[F_tensor,D] -> y[B,T,D]", "T"),
    "AllReduce by D": ("x[B,T,F_tensor] * w[F_tensor,D] -> y[B,T,D]", ""),
}
"""Form -> its product, and the dim that a sum which stays whole is cut along ("": its last)."""
RELATIVE = 1e-4
"""Of the largest entry: sums of float32 in another order. Narrower dtypes are held to `RELATIVE_16`."""
RELATIVE_16 = 3e-2

Timed = Callable[[], Any]
"""Runs once and hands back what has to be waited for."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=0, help="4 emulated ones or all accelerators by default")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def sizes_of(quick: bool, on_cpu: bool) -> dict[str, int]:
    """Sizes of the dims of the three forms: a step of training on an accelerator, much smaller on a CPU."""
    if quick:
        return {"B": 1, "T": 256, "D": 128, "F": 256}
    return {"B": 1, "T": 2048, "D": 512, "F": 2048} if on_cpu else {"B": 2, "T": 8192, "D": 4096, "F": 14336}


def form_contestants(text: str, along: str, mesh: Any, sizes: dict[str, int], dtype: Any) -> dict[str, Timed]:
    """One form in blocks, plain, and as a product on one device; all of the same arrays."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from meshwright.algebra.derived import Derived
    from meshwright.algebra.einsum import einsum_steps
    from meshwright.algebra.program import Program
    from meshwright.algebra.rewrites.collective_matmul import with_collective_matmuls
    from meshwright.calculators.sharding.parsing import parse_einsum
    from meshwright.nn.context import Context
    from meshwright.nn.interpreter import run
    from meshwright.parallel.mesh import partition_spec
    from meshwright.spec import catalogue

    lhs, rhs, out = parse_einsum(text)
    keys = jax.random.split(jax.random.key(0))
    shapes = [[sizes[dim] for dim in array.dims] for array in (lhs, rhs)]
    full = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
    full[1] = full[1] / jnp.sqrt(jnp.asarray(full[1].shape[0], dtype))
    split = [jax.device_put(v, NamedSharding(mesh, partition_spec(a))) for v, a in zip(full, (lhs, rhs), strict=True)]
    nothing = Derived(Program((), {}), (), (), {}, ())
    context = Context(model=catalogue.load_model("tiny"), derived=nothing, mesh=dict(mesh.shape))
    found: dict[str, Timed] = {}
    for way, ways in zip(WAYS, range(3), strict=True):
        steps = einsum_steps(lhs, rhs, out)
        steps = with_collective_matmuls(steps, ways=ways, along=along) if ways else steps

        def local(x: jax.Array, w: jax.Array, steps: Any = steps) -> jax.Array:
            return run(context, steps, {lhs: x, rhs: w})[out]

        specs = tuple(partition_spec(a) for a in (lhs, rhs))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=partition_spec(out), check_vma=False)
        compiled = jax.jit(mapped).lower(*split).compile()
        found[NAMES[way]] = lambda c=compiled: c(*split)  # type: ignore[misc]
    one = jax.device_put(full, mesh.devices.flat[0])
    whole = jax.jit(lambda x, w: jnp.einsum("bti,ij->btj", x, w)).lower(*one).compile()
    found["one device"] = lambda: whole(*one)
    return found


def block_contestants(num_devices: int, quick: bool, on_cpu: bool) -> dict[str, Timed]:
    """A training step of one layer with a small vocabulary: the loss and the gradients' norm."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    from meshwright.parallel.train_step import TrainStep
    from meshwright.spec.model import Model
    from meshwright.spec.strategy import Strategy, make_mesh

    width, length = (128, 64) if quick else (512, 1024) if on_cpu else (4096, 8192)
    heads = max(8, width // 128)
    model = Model(
        name="layer", family="llama", num_layers=1, d_model=width, d_ff=7 * width // 2, num_heads=heads, num_kv_heads=8,
        head_dim=width // heads, vocab_size=512,
    )  # fmt: skip
    rows = np.random.default_rng(0).integers(0, model.vocab_size, (2, length + 1)).astype(np.int32)
    batch = {"tokens": jnp.asarray(rows[:, :-1]), "labels": jnp.asarray(rows[:, 1:])}
    found: dict[str, Timed] = {}
    cases = {**{NAMES[way]: (num_devices, way) for way in WAYS}, "one device": (1, "none")}
    for name, (size, way) in cases.items():
        strategy = Strategy(
            mesh=make_mesh({"tensor": size}),
            state="fp32" if on_cpu else "bf16-adam",
            collective_matmul=way,  # type: ignore[arg-type]
        )
        step = TrainStep(model, strategy, optimizer=optax.sgd(0.0))
        states = [step.init(0)]
        placed = step.place(batch)

        def once(step: TrainStep = step, states: list[Any] = states, placed: Any = placed) -> Any:
            state, metrics = step.compile(states.pop(), placed)
            states.append(state)
            return jnp.stack([metrics.loss, metrics.grad_norm])

        found[name] = once
    return found


def hold(contestants: dict[str, Timed], relative: float) -> float:
    """The largest difference to one device, over its largest entry; a SystemExit where it is too large."""
    import numpy as np

    expected = np.asarray(contestants["one device"](), np.float32)
    worst = 0.0
    for name, once in contestants.items():
        off = float(np.abs(np.asarray(once(), np.float32) - expected).max() / np.abs(expected).max())
        if not off < relative:
            raise SystemExit(f"{name} differs from one device by {off:.1e}")
        worst = max(worst, off)
    return worst


def measure(contestants: dict[str, Timed], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each, and the median over rounds of its ratio to the plain form; lower is faster."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        names = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        for name in names:
            jax.block_until_ready(contestants[name]())  # brings back what others pushed out
            start = time.perf_counter()
            jax.block_until_ready(contestants[name]())
            seconds[name].append(time.perf_counter() - start)
    plain = seconds[PLAIN]
    return {
        name: {
            "ms": 1e3 * statistics.median(own),
            "to_plain": statistics.median(a / b for a, b in zip(own, plain, strict=True)),
        }
        for name, own in seconds.items()
    }


def main() -> None:
    asked = arguments()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={asked.devices or 4}")
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType

    on_cpu = jax.default_backend() == "cpu"
    devices = jax.devices()[: asked.devices or None]
    if len(devices) < 2:
        raise SystemExit(f"{len(devices)} device is no ring. Set JAX_PLATFORMS=cpu for emulated ones.")
    mesh = jax.make_mesh((len(devices),), ("tensor",), axis_types=(AxisType.Auto,), devices=devices)
    sizes = sizes_of(asked.quick, on_cpu)
    rounds = asked.rounds or (3 if asked.quick else 9)
    dtype, relative = (jnp.float32, RELATIVE) if on_cpu else (jnp.bfloat16, RELATIVE_16)
    found: dict[str, dict[str, dict[str, float]]] = {}
    worst = 0.0
    for name in (*FORMS, "layer"):
        contestants = (
            form_contestants(*FORMS[name], mesh, sizes, dtype)
            if name in FORMS
            else block_contestants(len(devices), asked.quick, on_cpu)
        )
        worst = max(worst, hold(contestants, relative))
        found[name] = measure(contestants, rounds)
    load = f"load {os.getloadavg()[0]:.0f} with what else ran there"
    where = f"{platform.machine()}, {os.cpu_count()} cores, {load}" if on_cpu else devices[0].device_kind
    facts = {
        "devices": f"{len(devices)} {'emulated devices' if on_cpu else 'devices'}", "machine": where,
        "python": platform.python_version(), "jax": jax.__version__, "sizes": sizes, "rounds": rounds,
        "largest_difference": worst,
    }  # fmt: skip
    if asked.json:
        print(json.dumps({**facts, "results": found}, indent=1))
        return
    show(facts, found, on_cpu)


def show(facts: dict[str, Any], found: dict[str, dict[str, dict[str, float]]], on_cpu: bool) -> None:
    """A row for each form, a column for each contestant: milliseconds, and the ratio to plain."""
    sizes = ", ".join(f"{dim} {size}" for dim, size in facts["sizes"].items())
    print(f"{time.strftime('%Y-%m-%d')}, {facts['devices']} of {facts['machine']}, Python {facts['python']}, "
          f"jax {facts['jax']}")  # fmt: skip
    print(f"{sizes}; median of {facts['rounds']} rounds, each beside plain in the same round (lower is faster)")
    print(f"largest difference to one device {facts['largest_difference']:.1e} of the largest entry\n")
    names = list(next(iter(found.values())))
    print(f"{'':16}" + "".join(f"{name:>22}" for name in names))
    for form, row in found.items():
        print(f"{form:16}" + "".join(f"{row[n]['ms']:>12.1f} ms {row[n]['to_plain']:>5.2f}x" for n in names))
    if on_cpu:
        print("\nEmulated devices share the cores that compute: nothing overlaps. Ratios above 1 are what blocks cost")
        print("(smaller products, more copies), ratios below 1 what the plain collective costs on these devices.")


if __name__ == "__main__":
    main()
