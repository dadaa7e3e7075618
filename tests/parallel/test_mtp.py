"""Multi-token prediction: one device beside the paper's equation, meshes beside one device, collectives as derived."""

from functools import lru_cache

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.derive import derive_job
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.cost.work.ops import model_flops
from meshwright.nn.weights import init_params
from meshwright.parallel.second_labels import second_labels
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import mtp_params, weight_table, without_mtp
from tests.logits import logits_fn
from tests.parallel.cases import RELATIVE, keep_gradients, run_step, strategy_of
from tests.parallel.plain_mtp import BATCH_SEQS, MODEL, SEQ_LEN, batch, plain_loss
from tests.parallel.small import MODEL as SMALL
from tests.traffic import derived_traffic

DECODE = Job(kind="decode", batch_seqs=8, seq_len=32)
DOCUMENTS = ProgramOptions(documents=True)


@lru_cache
def params_of():
    """Weights of which none is zero."""
    draw = np.random.default_rng(2).normal
    return {n: np.asarray(a + 0.1 * draw(size=a.shape), np.float32) for n, a in init_params(MODEL, 0).items()}


@lru_cache
def plain():
    """Both losses, and the gradients of their weighted sum, of plain JAX in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = {name: np.asarray(array, np.float64) for name, array in params_of().items()}
        gradients, losses = jax.jit(jax.grad(lambda p: plain_loss(p, batch()), has_aux=True))(wide)
        return tuple(map(float, losses)), {name: np.asarray(value) for name, value in gradients.items()}


def step_of(axes, **choices):
    return TrainStep(MODEL, strategy_of(axes, **choices), optimizer=keep_gradients(), options=DOCUMENTS)


def state_of(step):
    params = jax.device_put(step.from_canonical(params_of()), step.state_shardings.params)
    return State(params, step.init_optimizer(params))


def assert_plain(loss, gradients):
    """The loss of the main model, and every gradient by its largest entry."""
    (main, _), expected = plain()
    assert abs(loss / main - 1) < RELATIVE
    assert gradients.keys() == expected.keys() - {"router_correction_moe", "router_correction_mtp"}
    for name, value in gradients.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, f"{name} has no gradient"
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=RELATIVE * scale, err_msg=name)


def with_shared_gathers(derived):
    """The steps without gathers of what straight code has gathered already: the compiler makes them once. A loop of one
    layer is straight code: the first layer, the one that predicts the second token, and both ends of each stack."""
    seen, blocks = set(), []
    for block in derived.blocks:
        left = {"forward": [], "backward": []}
        for phase, steps in (("forward", block.forward), ("backward", block.backward)):
            for step in steps:
                is_weight = step.result.name in derived.weights
                key = (None if is_weight else block.name, step.inputs, step.result)
                again = block.repeat == 1 and step.op == "all_gather" and step.scope != "step" and key in seen
                left[phase] += [] if again else [step]
                seen.add(key)
        blocks.append(replace(block, **{phase: tuple(steps) for phase, steps in left.items()}))
    return replace(derived, blocks=tuple(blocks))


def test_losses_and_gradients_are_those_of_the_papers_equation():
    step = step_of({})
    state, metrics = step.step(state_of(step), batch())
    assert_plain(float(metrics.loss), {name: np.asarray(value) for name, value in state.opt_state.items()})
    assert abs(float(metrics.extras["mtp_loss"]) / plain()[0][1] - 1) < RELATIVE


@pytest.mark.slow
def test_evaluation_and_logits_are_of_the_next_token_alone():
    step, given = step_of({}), batch()
    placed = step.place(given)
    mean = float(step.loss_sum(state_of(step).params, placed)) / float(placed["num_labels"])
    assert abs(mean / plain()[0][0] - 1) < RELATIVE
    both = (jax.jit(logits_fn(model))(params_of(), given["tokens"]) for model in (MODEL, without_mtp(MODEL)))
    np.testing.assert_array_equal(*both)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "choices"),
    [
        ({"fsdp": 2, "tensor": 2}, {"remat": "none"}),
        ({"data": 2}, {"num_microbatches": 2, "remat": "none", "gradient_sync": "naive"}),
        ({"context": 2, "tensor": 2}, {"remat": "none"}),
        ({"context": 2}, {"context_attention": "ring", "remat": "selective"}),
        ({"expert": 2}, {}),
        ({"expert": 2, "tensor": 2}, {"zero": 1, "sequence_parallel": False}),
        ({"fsdp": 2}, {"prefetch": True, "num_microbatches": 2}),
    ],
    ids=["fsdp-tensor", "data", "context", "ring", "expert", "whole-stream", "ahead"],
)
def test_meshes_give_what_the_equation_does_and_send_what_is_derived(axes, choices):
    step = step_of(axes, **choices)
    found = run_step(step, state=state_of(step), given=batch())
    assert_plain(found.loss, found.gradients)
    # in straight code the compiler also shares some of what a layer runs again, such as the rounds of a ring
    if step.strategy.num_microbatches == 1 and choices.get("remat") != "selective":
        sizes = {
            **MODEL.dims,
            "B": BATCH_SEQS,
            "T": SEQ_LEN,
            "C": BATCH_SEQS * SEQ_LEN * MODEL.experts_per_token // MODEL.num_experts,
            "Er": len(ROUTING_ROWS),
        }
        once = with_shared_gathers(step.declared)
        assert found.compiled == derived_traffic(once, sizes, step.strategy.mesh, num_microbatches=1, width=4)
    if "gradient_sync" in choices:
        assert found.compiled == found.derived


def test_second_labels_stay_in_their_row_and_document():
    given = batch()
    after = np.minimum(np.arange(SEQ_LEN) + 1, SEQ_LEN - 1)
    found = second_labels(given, {name: array[:, after] for name, array in given.items()})
    np.testing.assert_array_equal(found["mtp_tokens"][:, :-1], given["tokens"][:, 1:])
    labels = given["labels"][0]
    assert found["mtp_labels"][0].tolist() == [labels[1], -1, -1, *labels[4:9], -1, -1, *labels[11:], -1]


def test_a_step_that_does_not_ask_has_no_second_prediction():
    """Generation neither."""
    without = replace(MODEL, mtp_weight=0.0)
    assert transformer(without) == transformer(replace(without, num_mtp_layers=0))
    assert "mtp_loss" not in transformer(without).variables
    paged = Storage(page_len=16)
    of_both = (derive_job(model, DECODE, strategy_of({}), storage=paged) for model in (MODEL, without))
    assert next(of_both) == next(of_both)


def test_what_does_not_run_says_so():
    with pytest.raises(CannotRunError, match="a model with mtp_weight does not run in a pipeline"):
        step_of({"pipeline": 2}, num_microbatches=2)
    with pytest.raises(InputError, match=r"mtp_weight=0\.1 needs a deepseek_v3 or a glm4_moe with num_mtp_layers=1"):
        replace(SMALL, mtp_weight=0.1)
    with pytest.raises(InputError, match="with 2"):
        replace(MODEL, num_mtp_layers=2)


def test_the_planner_prices_the_module():
    """Its FLOPs, its state and, of the numbers that MFU counts, a layer and a second head."""
    job, mesh = Job(batch_seqs=64, seq_len=4096), Strategy(mesh=make_mesh({"fsdp": 8, "tensor": 4}))
    deep = catalogue.load_model("deepseek-v3")
    with_module, without = (
        estimate_step(Setting(replace(deep, mtp_weight=weight), parse_cluster("h100:8x4"), job), mesh)
        for weight in (0.3, 0.0)
    )
    layer = [row for row in weight_table(deep) if deep.num_layers - 1 in row.layers and row.kind == "matrix"]
    active = sum(row.num_active_params / row.repeat for row in layer) + 2 * deep.d_model**2
    products = 6 * (active + deep.d_model * deep.vocab_size) * job.tokens_per_step
    attention = 6 * job.tokens_per_step * (job.seq_len + 1) / 2 * deep.num_heads * (deep.head_dim + deep.v_head_dim)
    again = with_module.flops - without.flops - products - attention
    assert 0 <= again < 0.5 * (products + attention), "remat runs the layer's products again"
    more, split = mtp_params(deep) * 2 / mesh.num_chips, mesh.mesh["tensor"]
    narrow = 2 * (2 * deep.d_model**2 + deep.d_model * (deep.q_lora_rank + deep.kv_lora_rank)) / mesh.num_chips
    # tensor splits neither the projection nor the latents
    more += (split - 1) * narrow
    assert with_module.memory["weights"] - without.memory["weights"] == pytest.approx(more, rel=0.002)
    counted = model_flops(replace(deep, mtp_weight=0.3), job) - model_flops(deep, job)
    whole = 6 * job.tokens_per_step * job.seq_len * deep.num_heads * (deep.head_dim + deep.v_head_dim)
    assert counted == pytest.approx(products + whole, rel=1e-9)
