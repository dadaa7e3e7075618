"""Adapters in the derivation: what is made for frozen weights, and what is not."""

import pytest
from msgspec.structs import replace

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.cost.train_step import estimate_step
from meshwright.cost.work.ops import model_flops, num_matmul_params
from meshwright.spec.catalogue import load_model
from meshwright.spec.job import Job
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import num_params, weight_table

PLAIN = replace(load_model("llama3-8b"), num_layers=4)
ADAPTED = replace(PLAIN, lora=Lora(rank=16, alpha=32, targets="q,v,down"))
JOB = Job(batch_seqs=8, seq_len=1024)


def steps(model, *, remat="block", zero=3, **axes):
    strategy = Strategy(mesh=make_mesh(axes), remat=remat, assignment=standard_assignment(zero=zero))
    return derive(transformer(model), strategy)


def made(derived, phase):
    return {step.result.name for block in derived.blocks for step in block.backward if step.phase == phase}


def test_frozen_weights_have_no_gradients_no_sums_and_no_update():
    derived = steps(ADAPTED, fsdp=4, data=2, tensor=2)
    adapters = {f"{name}_lora_{letter}" for name in ("wq", "wv", "w_down") for letter in "ab"}
    weights = derived.program.variables.keys() & {v.name for v in derived.program.of_role("weight", "vector")}
    assert {name[1:] for name in made(derived, "backward")} & weights == adapters
    assert derived.weights.keys() == adapters
    assert {step.result.name for step in derived.update} == {"loss", "grad_norm"} | adapters
    embed = derived.blocks[0]
    assert embed.forward
    assert embed.backward == ()


def test_frozen_weights_are_still_gathered_in_both_passes():
    derived = steps(ADAPTED, fsdp=8)
    layer = derived.blocks[1]
    for part in (layer.forward, layer.backward):
        gathered = {step.result.name for step in part if step.op == "all_gather"}
        assert {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"} <= gathered


def test_adapters_are_split_as_their_weights_and_never_over_the_rank():
    declared = steps(ADAPTED, fsdp=4, tensor=2).declared
    assert [str(declared[f"{name}_lora_{letter}"]) for name in ("wq", "w_down") for letter in "ab"] == [
        "wq_lora_a[D_fsdp, Ra]",
        "wq_lora_b[Ra, N_tensor, H]",
        "w_down_lora_a[F_tensor, Ra]",
        "w_down_lora_b[Ra, D_fsdp]",
    ]


def test_four_flops_for_each_frozen_parameter_and_token():
    """6 for those of the adapters; attention's own products are those of any backward pass."""
    frozen, every = num_matmul_params(ADAPTED, frozen=True), num_matmul_params(ADAPTED)
    assert frozen == num_matmul_params(PLAIN)
    scores = model_flops(PLAIN, JOB) - 6 * frozen * JOB.tokens_per_step
    expected = (4 * frozen + 6 * (every - frozen)) * JOB.tokens_per_step + scores
    assert model_flops(ADAPTED, JOB) == pytest.approx(expected, rel=1e-12)


def test_fewer_flops_are_priced_than_of_all_weights():
    """The products of the gradients of frozen weights go, and of what follows from the tokens nothing is left."""
    from meshwright.cost.setting import Setting
    from meshwright.spec.cluster import parse_cluster

    # with one microbatch there are no gradients yet while the head, which needs the most, runs
    strategy = Strategy(mesh=make_mesh({}), remat="none", num_microbatches=2)
    full, adapted = (
        estimate_step(Setting(model, parse_cluster("h100:1x1"), JOB), strategy) for model in (PLAIN, ADAPTED)
    )
    needed = model_flops(PLAIN, JOB, causal=True) - model_flops(ADAPTED, JOB, causal=True)
    assert full.flops - adapted.flops == pytest.approx(needed, rel=1e-6)
    held = {name: adapted.memory[name] / full.memory[name] for name in ("weights", "gradients", "optimizer")}
    assert 1 < held["weights"] < 1.02
    assert held["gradients"] == held["optimizer"] < 0.02


def test_what_needs_no_gradient_is_not_kept():
    """The operands of the gradients of frozen weights are not held for the backward pass."""
    kept = {array.name for array in steps(replace(PLAIN, lora=Lora(targets="q")), remat="none").blocks[1].kept}
    assert not {"m", "a"} & kept
    assert {"h", "g", "u", "o", "qr"} <= kept


def test_fused_projections_share_an_adapter():
    phi = replace(load_model("phi3-mini"), lora=Lora(rank=4))
    names = [row.name for row in weight_table(phi) if row.part == "adapter"]
    assert [n for n in names if n.endswith("_a")] == [f"layers.{w}_lora_a" for w in ("wq", "wo", "w_gate", "w_down")]
    assert len([n for n in names if n.endswith("_b")]) == 7
    with pytest.raises(InputError, match=r"stores wq, wk, wv as one array\. Target all of them"):
        weight_table(replace(phi, lora=Lora(targets="q,v")))


def test_parameters_of_an_adapter():
    rank, layers = 16, PLAIN.num_layers
    sizes = PLAIN.dims
    heads, keys = sizes["N"] * sizes["H"], sizes["K"] * sizes["H"]
    own = rank * layers * (sizes["D"] + heads + sizes["D"] + keys + sizes["F"] + sizes["D"])
    assert num_params(ADAPTED) - num_params(PLAIN) == own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targets": "q,w"}, "lora.targets has 'w'"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"rank": 0}, "lora.rank=0 must be at least 1"),
    ],
)
def test_adapters_that_cannot_be(given, message):
    with pytest.raises(InputError, match=message):
        Lora(**given)


def test_models_without_a_place_for_them():
    with pytest.raises(InputError, match=r"Use lora\.targets=attention"):
        replace(load_model("mixtral-8x7b"), lora=Lora())
    with pytest.raises(InputError, match="has no w_gate"):
        weight_table(replace(load_model("gpt2"), lora=Lora(targets="gate")))


def test_a_quantised_base_is_gathered_and_held_in_its_own_dtype():
    from meshwright.cost.setting import Setting
    from meshwright.spec.cluster import parse_cluster

    model = replace(PLAIN, lora=Lora(rank=16, base="int4"))
    derived = steps(model, fsdp=8)
    (gathered,) = (s.result for s in derived.blocks[1].forward if s.op == "all_gather" and s.result.name == "wq")
    assert gathered.dtype == "int4"
    assert str(derived.declared["w_down_scale"]) == "w_down_scale[Fg, D_fsdp]"
    strategy = Strategy(mesh=make_mesh({}), remat="none")
    found, plain = (
        estimate_step(Setting(each, parse_cluster("h100:1x1"), JOB), strategy)
        for each in (model, replace(model, lora=Lora(rank=16)))
    )
    layers = sum(row.num_params for row in weight_table(PLAIN) if row.part in ("attention", "mlp"))
    saved = layers * (2 - 0.5 - 4 / 64)
    assert plain.memory["weights"] - found.memory["weights"] == pytest.approx(saved, rel=1e-9)
    assert found.mfu * found.step_s == pytest.approx(plain.mfu * plain.step_s, rel=1e-9)
