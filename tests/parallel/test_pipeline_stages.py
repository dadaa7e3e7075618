"""A derived model in stages: loss and gradients of one device, and the derived collectives in the compiled text."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.derive import derive
from meshwright.algebra.schedule_rows import SCHEDULES, default_chunks
from meshwright.algebra.transformer import transformer, weight_variables
from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn.context import Context
from meshwright.nn.weights import init_params
from meshwright.parallel.blocks import step_steps
from meshwright.parallel.gradients import microbatch_gradients, once_per_step
from meshwright.parallel.mesh import device_mesh, partition_spec
from meshwright.parallel.passes import Passes
from meshwright.parallel.pipeline_stages import Pipeline, strategy_schedule
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.verify.compare import compiled_traffic
from meshwright.verify.hlo import collectives
from meshwright.verify.pipeline import pipeline_traffic
from tests.parallel.small import MODEL, SEQ_LEN

RELATIVE = 1e-5
MICROBATCHES, SEQS = 4, 16
LLAMA = msgspec.structs.replace(MODEL, name="llama", num_layers=4)
TWO_KINDS = msgspec.structs.replace(
    MODEL, name="two kinds", num_layers=8, sliding_window=4, sliding_layers=(0, 2, 4, 6), tied_embeddings=True
)
DLOSS = 1 / (SEQS * SEQ_LEN)


@lru_cache
def inputs():
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (SEQS, SEQ_LEN + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), (SEQS, SEQ_LEN))
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "positions": positions}


def stacked(model):
    return frozenset(name for name, (weight, _) in weight_variables(model).items() if weight.layers)


@lru_cache
def on_one_device(model):
    derived = derive(transformer(model), Strategy(mesh={}, state="fp32"))
    passes = Passes(Context(model=model, derived=derived, mesh={}))
    arrays = {name: jnp.asarray(value) for name, value in inputs().items()}
    return jax.jit(lambda params: microbatch_gradients(passes, params, arrays, jnp.float32(DLOSS)))(
        init_params(model, 0)
    )


class Staged:
    """One strategy of one model, as a training step would run it."""

    def __init__(self, model, axes, schedule, *, count=MICROBATCHES, sequence_parallel=True, **choices):
        self.model, self.mesh = model, make_mesh(axes)
        self.strategy = Strategy(
            mesh=self.mesh,
            state="fp32",
            num_microbatches=count,
            schedule=schedule,
            chunks=choices.pop("chunks", default_chunks(schedule)),
            assignment=standard_assignment(sequence_parallel=sequence_parallel),
            **choices,
        )
        self.derived = derive(transformer(model), self.strategy)
        context = Context(model=model, derived=self.derived, mesh=self.mesh)
        self.stages = Pipeline(context=context, schedule=strategy_schedule(self.strategy), stacked=stacked(model))
        self.devices = device_mesh(self.mesh)
        self.param_specs = {name: self.spec(name) for name in weight_variables(model)}
        self.input_specs = {name: partition_spec(self.derived.declared[name]) for name in inputs()}

    def spec(self, name):
        own = partition_spec(self.derived.declared[name], stacked=name in self.stages.stacked)
        return PartitionSpec("pipeline", *own[1:]) if name in self.stages.stacked else own

    def step(self, params, given):
        loss, grads = self.stages.gradients(params, given, jnp.float32(DLOSS))
        grads = once_per_step(self.derived, grads, stacked=self.stages.stacked)
        return self.summed(loss), {name: self.over_stages(name, grad) for name, grad in grads.items()}

    def over_stages(self, name, grad):
        done = name in self.stages.stacked or any("pipeline" in s.axes for s in step_steps(self.derived).get(name, ()))
        return grad if done else lax.psum(grad, "pipeline")

    def summed(self, loss):
        return lax.psum(loss, next(s.axes for s in self.derived.update if s.result.name == "loss"))

    def compiled(self, body, out_specs):
        given = (self.placed(self.stages.stored(init_params(self.model, 0)), self.param_specs),)
        given += (self.placed(inputs(), self.input_specs),)
        specs = (self.param_specs, self.input_specs)
        mapped = jax.shard_map(body, mesh=self.devices, in_specs=specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped).lower(*given).compile(), given

    def placed(self, arrays, specs):
        return {n: jax.device_put(a, NamedSharding(self.devices, specs[n])) for n, a in arrays.items()}

    def assert_as_on_one_device(self):
        program, given = self.compiled(self.step, (PartitionSpec(), self.param_specs))
        loss, grads = program(*given)
        wanted_loss, wanted = on_one_device(self.model)
        assert abs(float(loss) / float(wanted_loss) - 1) < RELATIVE
        found = self.stages.in_order({name: np.asarray(grad) for name, grad in grads.items()})
        for name, value in wanted.items():
            scale = np.abs(value).max()
            assert scale > 0, f"{name} has no gradient"
            np.testing.assert_allclose(found[name], value, rtol=0, atol=RELATIVE * scale, err_msg=name)
        return program

    def assert_as_derived(self, program):
        """What is outside the branches is there once or in every tick, what is inside in every tick too."""
        found = collectives(program.as_text(), self.mesh)
        assert not any(c.in_conditional for c in found if c.kind == "permute")
        dims = {**self.model.dims, "B": SEQS, "T": SEQ_LEN, "C": SEQS * SEQ_LEN // self.strategy.num_microbatches}
        wanted = pipeline_traffic(self.derived, self.stages.tables, dims, self.mesh, width=4)
        of_step = compiled_traffic(found, self.mesh)
        sums = {key for key in {*wanted, *of_step} if key[0] == "all_reduce"}
        assert {k: v for k, v in of_step.items() if k not in sums} == {k: v for k, v in wanted.items() if k not in sums}


def test_split_passes_over_three_axes():
    staged = Staged(LLAMA, {"pipeline": 2, "fsdp": 2, "tensor": 2}, "zb-h1")
    staged.assert_as_derived(staged.assert_as_on_one_device())


def test_two_kinds_of_layers_and_a_stream_that_is_sent_in_parts():
    """Where all devices of ``tensor`` have the whole stream, each sends a part of it, and the next stage gathers it."""
    staged = Staged(TWO_KINDS, {"pipeline": 2, "tensor": 2}, "interleaved", sequence_parallel=False, remat="none")
    staged.assert_as_derived(staged.assert_as_on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_four_stages(schedule):
    model = msgspec.structs.replace(LLAMA, num_layers=8)
    Staged(model, {"pipeline": 4, "data": 2}, schedule, count=8).assert_as_on_one_device()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "schedule", "choices"),
    [
        ({"pipeline": 2, "data": 2, "tensor": 2}, "1f1b", {}),
        ({"pipeline": 2, "tensor": 4}, "gpipe", {"sequence_parallel": False}),
        ({"pipeline": 2, "fsdp": 2, "context": 2}, "interleaved", {"remat": "selective"}),
        ({"pipeline": 2, "fsdp": 2, "context": 2}, "1f1b", {"context_attention": "ring"}),
        ({"pipeline": 2, "context": 2, "tensor": 2}, "zb-h2", {"context_attention": "ulysses"}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "zb-h1", {"remat": "every-2"}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "dualpipe", {"remat": "none"}),
        ({"pipeline": 2, "data": 2, "fsdp": 2}, "dualpipe-v", {"remat": "full"}),
    ],
)
def test_mixes(axes, schedule, choices):
    staged = Staged(TWO_KINDS, axes, schedule, **choices)
    program = staged.assert_as_on_one_device()
    assert not any(c.in_conditional for c in collectives(program.as_text(), staged.mesh) if c.kind == "permute")


@pytest.mark.slow
def test_the_loss_alone():
    staged = Staged(TWO_KINDS, {"pipeline": 2, "fsdp": 2, "tensor": 2}, "dualpipe-v")
    body = lambda params, given: staged.summed(staged.stages.loss(params, given))  # noqa: E731
    program, given = staged.compiled(body, PartitionSpec())
    assert abs(float(program(*given)) / float(on_one_device(TWO_KINDS)[0]) - 1) < RELATIVE


def test_what_does_not_run_in_stages():
    with pytest.raises(CannotRunError, match=r"pipeline=4 gives stages of 1 layers that differ"):
        Staged(msgspec.structs.replace(TWO_KINDS, num_layers=4, sliding_layers=(0, 2)), {"pipeline": 4}, "1f1b")
    staged = Staged(LLAMA, {"pipeline": 2}, "1f1b")
    with pytest.raises(CannotRunError, match="offload of activations does not run in a pipeline"):
        Pipeline(
            context=Context(model=LLAMA, derived=staged.derived, mesh=staged.mesh, offload=True),
            schedule=staged.stages.schedule,
            stacked=staged.stages.stacked,
        )


def test_a_schedule_file(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    strategy = Strategy(mesh=make_mesh({"pipeline": 2}), num_microbatches=2, schedule=str(path))
    assert strategy_schedule(strategy).name == "own"
    more = msgspec.structs.replace(strategy, num_microbatches=4)
    with pytest.raises(InputError, match="is for 2 stages and 2 microbatches, and the strategy has pipeline=2 and num"):
        strategy_schedule(more)
    with pytest.raises(InputError, match="schedule '1f2b' is not known"):
        strategy_schedule(msgspec.structs.replace(strategy, schedule="1f2b"))
