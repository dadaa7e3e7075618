"""Adapters beside frozen weights: every mesh trains what PEFT trains, and the base stays as it is."""

import jax
import numpy as np
import optax
import pytest
from msgspec.structs import replace

from meshwright.algebra.transformer import rows
from meshwright.nn.hf.adapter import adapted_model
from meshwright.nn.hf.weights import load_params, save_adapter, source_of
from meshwright.nn.quantisation import dequantise_params, quantised_base
from meshwright.nn.weights import Params
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.catalogue import load_model
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import frozen_base
from tests.logits import logits_fn
from tests.nn.families import CONFIGS, FAMILIES, VOCAB
from tests.parity import their_model

ROWS = np.random.default_rng(3).integers(0, VOCAB, (4, 33)).astype(np.int32)
BATCH = {"tokens": ROWS[:, :-1], "labels": ROWS[:, 1:]}
RATE, DECAY, EPSILON, STEPS = 1e-2, 0.1, 1e-4, 3
"""An epsilon above the rounding of gradients: the first update of a weight is its gradient over its size."""
LORA = Lora(rank=4, alpha=8)

MESHES = {
    "one device": Strategy(mesh=make_mesh({}), state="fp32"),
    "fsdp and tensor": Strategy(mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), state="fp32", remat="none"),
    "tensor, stream whole": Strategy(
        mesh=make_mesh({"fsdp": 4, "tensor": 2}),
        state="fp32",
        assignment=standard_assignment(zero=1, sequence_parallel=False),
    ),
    "pipeline": Strategy(
        mesh=make_mesh({"pipeline": 2, "fsdp": 2, "tensor": 2}), state="fp32", num_microbatches=2, remat="full"
    ),
    "context": Strategy(mesh=make_mesh({"fsdp": 4, "context": 2}), state="fp32", context_attention="ring"),
}


def trained(step: TrainStep, given: Params | None = None) -> tuple[list[float], Params]:
    """The losses of the first steps, and the adapters after them in the order of the model; the base must stay."""
    state = step.init(0, given)
    before = {name: np.asarray(array) for name, array in state.params.items() if name not in step.shards}
    losses = []
    for _ in range(STEPS):
        state, metrics = step.step(state, BATCH)
        losses.append(float(metrics.loss))
    for name, array in before.items():
        np.testing.assert_array_equal(state.params[name], array, err_msg=name)
    found = step.to_canonical(state.params)
    return losses, {name: np.asarray(found[name]) for name in step.shards}


def adamw() -> optax.GradientTransformation:
    return optax.adamw(RATE, b1=0.9, b2=0.95, eps=EPSILON, weight_decay=DECAY)


def model_of(family: str):
    """The family's small model with as many layers as two stages divide."""
    return replace(FAMILIES[family], num_layers=2, sliding_layers=(), sliding_window=None, lora=LORA)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fsdp and tensor", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MESHES)[2:])]
)
def test_every_mesh_trains_as_one_device(name):
    model = model_of("phi3")
    expected, of_one = trained(TrainStep(model, MESHES["one device"], optimizer=adamw()))
    losses, adapters = trained(TrainStep(model, MESHES[name], optimizer=adamw()))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    for weight, value in of_one.items():
        np.testing.assert_allclose(adapters[weight], value, rtol=0, atol=1e-5, err_msg=weight)


def test_the_state_holds_moments_of_the_adapter_alone():
    step = TrainStep(model_of("llama"), MESHES["one device"])
    held = sum(leaf.size for leaf in jax.tree.leaves(step.state_shapes.opt_state) if leaf.ndim)
    assert held == 2 * sum(row.num_params for row in rows(step.model).values() if row.part == "adapter")


# -- beside PEFT -------------------------------------------------------------------------------------------


def peft_model(family: str, folder):
    """PEFT's model of random weights, its base in ``folder / "base"``, and this package's model of the same."""
    pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed: make test installs it")
    config = dict(CONFIGS[family]) | {"num_hidden_layers": 2}
    config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    config |= {"use_sliding_window": False} if family == "qwen2" else {}
    base = their_model(config)
    base.save_pretrained(folder / "base")
    settings = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
    )
    return peft.get_peft_model(base, settings).eval()  # without dropout


def their_losses(theirs) -> list[float]:
    """Losses of AdamW steps, which decay every adapter as the settings of training do."""
    import torch

    weights = [weight for weight in theirs.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=DECAY)
    tokens, labels = (torch.tensor(BATCH[name], dtype=torch.long) for name in ("tokens", "labels"))
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


SLOW = pytest.mark.slow
PAIRS = [
    ("phi3", "one device"),
    *(pytest.param(family, "one device", marks=SLOW) for family in ("llama", "llama-biases", "qwen2", "gpt2")),
    *(
        pytest.param(family, mesh, marks=SLOW)
        for family in ("llama", "qwen2", "phi3")
        for mesh in ("fsdp and tensor", "tensor, stream whole", "pipeline")
    ),
]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("family", "mesh"), PAIRS)
def test_three_steps_are_those_of_peft(family, mesh, tmp_path):
    theirs = peft_model(family, tmp_path)
    theirs.save_pretrained(tmp_path / "start")
    base = model_from_config(tmp_path / "base" / "config.json", family)
    (tmp_path / "start" / "base").symlink_to(tmp_path / "base")
    keys = (tmp_path / "start" / "adapter_config.json").read_text()
    name = theirs.peft_config["default"].base_model_name_or_path or ""
    quoted = f'"base_model_name_or_path": "{name}"'
    assert quoted in keys or '"base_model_name_or_path": null' in keys
    keys = keys.replace(quoted, '"base_model_name_or_path": "base"').replace(
        '"base_model_name_or_path": null', '"base_model_name_or_path": "base"'
    )
    (tmp_path / "start" / "adapter_config.json").write_text(keys)
    model = adapted_model(base, tmp_path / "start")
    expected = their_losses(theirs)

    step = TrainStep(model, MESHES[mesh], optimizer=adamw())
    losses, adapters = trained(step, load_params(model, tmp_path / "start"))
    assert losses == pytest.approx(expected, rel=1e-5)

    theirs.save_pretrained(tmp_path / "end")
    (tmp_path / "end" / "adapter_config.json").write_text(keys)
    (tmp_path / "end" / "base").symlink_to(tmp_path / "base")
    after = load_params(model, tmp_path / "end")
    for weight, value in adapters.items():
        np.testing.assert_allclose(value, after[weight], rtol=0, atol=1e-5, err_msg=weight)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "family", ["phi3", *(pytest.param(f, marks=SLOW) for f in ("llama", "qwen2", "gpt2", "gemma2"))]
)
def test_peft_loads_the_adapter_and_gives_the_same_logits(family, tmp_path):
    theirs = peft_model(family, tmp_path)
    import peft
    import torch
    import transformers

    model = replace(model_from_config(tmp_path / "base" / "config.json", family), lora=LORA)
    rng = np.random.default_rng(1)
    params = load_params(frozen_base(model), tmp_path / "base") | {
        name: jax.numpy.asarray(rng.normal(0, 0.2, (row.repeat, *row.shape)), jax.numpy.float32)
        for name, row in rows(model).items()
        if row.part == "adapter"
    }
    save_adapter(model, *source_of(params), tmp_path / "adapter", base="../base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    expected = theirs(torch.tensor(BATCH["tokens"], dtype=torch.long)).logits.detach().numpy()
    found = np.asarray(jax.jit(logits_fn(model))(params, BATCH["tokens"]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# -- a quantised base --------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_quantised_base_trains_as_its_dequantised_weights(base):
    """On a mesh, with values and scales gathered, as on one device with the values that they stand for."""
    plain = replace(load_model("tiny"), num_layers=1, d_ff=512, lora=LORA)
    model = replace(plain, lora=replace(LORA, base=base))
    rows_of = np.random.default_rng(4).integers(0, model.vocab_size, (4, 17)).astype(np.int32)
    batch = {"tokens": rows_of[:, :-1], "labels": rows_of[:, 1:]}
    mesh = Strategy(mesh=make_mesh({"fsdp": 2, "tensor": 2}), state="fp32", remat="full")
    step, one = TrainStep(model, mesh), TrainStep(plain, MESHES["one device"])
    state = step.init(0)
    assert state.params["wq"].dtype == base
    stored = dequantise_params(state.params, quantised_base(model), jax.numpy.float32)
    whole = {name: np.asarray(array) for name, array in stored.items()}
    drawn = one.init(0).params
    half_a_step = np.abs(drawn["wq"]).max() / {"int8": 127, "int4": 7}[base] / 2
    assert 0 < np.abs(whole["wq"] - drawn["wq"]).max() <= half_a_step * 1.01
    (loss, grads), (expected, expected_grads) = step.gradients(state.params, batch), one.gradients(whole, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for name, grad in expected_grads.items():
        np.testing.assert_allclose(grads[name], grad, rtol=0, atol=1e-5 * np.abs(grad).max() + 1e-9, err_msg=name)
