"""Every family against transformers: logits, gradients, and folders that either side reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.hf.weights import load_params, read_params, save_hf
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.strategy import Strategy, make_mesh
from tests.logits import logits_fn
from tests.nn.families import BY_ROWS, CONFIGS, FAMILIES, VOCAB
from tests.parity import auto_class, their_model

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
transformers = pytest.importorskip("transformers")

SOURCES = np.random.default_rng(1).integers(0, VOCAB, (2, 24)).astype(np.int32)
"""Rows of the encoder, where a family has one."""


FRAMES = np.random.default_rng(2).normal(size=(2, 10, 48)).astype(np.float32)
"""Features of the encoder, where it reads such."""


def sources_of(model):
    if not model.encoder:
        return {}
    has_features = model.encoder.features > 0
    return {"encoder_features": jnp.asarray(FRAMES)} if has_features else {"encoder_tokens": jnp.asarray(SOURCES)}


RUNNING = [name for name, model in FAMILIES.items() if model.runs_here]
LENGTH = 40
"""Longer than the windows and than the lengths from which positions are stretched."""
QUICK = ("gemma2", "gemma4-shared", "gpt2", "qwen2_moe", "gpt_oss", "cohere", "falcon-groups", "llama4")
"""Families of the default tier where a test is not of all: between them they have every part that llama has not."""
ROWS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1)).astype(np.int32)
TOKENS, LABELS = ROWS[:, :-1], ROWS[:, 1:]


def quick_of(families, but=()):
    """Cases of all families, those that are not `QUICK` slow, and so those of ``but``."""
    quick = set(QUICK) - set(but)
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in families]


def their_logits(model):
    tokens, sources = (torch.tensor(rows, dtype=torch.long) for rows in (TOKENS, SOURCES))
    if model.config.model_type == "whisper":
        return model(input_features=torch.tensor(FRAMES, dtype=model.dtype), decoder_input_ids=tokens).logits
    if model.config.is_encoder_decoder:
        return model(input_ids=sources, decoder_input_ids=tokens).logits
    return model(tokens).logits


def arrays(tensors):
    return {name: tensor.detach().numpy() for name, tensor in tensors}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in BY_ROWS else []) for name in RUNNING]
)
def test_logits_are_those_of_transformers(family):
    theirs, model = their_model(CONFIGS[family]), FAMILIES[family]
    params = read_params(model, arrays(theirs.state_dict().items()))
    expected = their_logits(theirs).detach().numpy()
    found = np.asarray(jax.jit(logits_fn(model))(params, jnp.asarray(TOKENS), **sources_of(model)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", quick_of(FAMILIES))
def test_each_side_reads_what_the_other_wrote(family, tmp_path):
    theirs = their_model(CONFIGS[family])
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_from_config(tmp_path / "theirs", family)
    assert model == FAMILIES[family]
    params = load_params(model, tmp_path / "theirs")
    for name, array in read_params(model, arrays(theirs.state_dict().items())).items():
        np.testing.assert_array_equal(params[name], array)

    save_hf(model, params, tmp_path / "ours", 50_000)
    back = auto_class(model.family).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    np.testing.assert_array_equal(their_logits(back).detach(), their_logits(theirs).detach())


@pytest.mark.parametrize("family", quick_of(RUNNING, but=("gemma2", "qwen2_moe", "gpt_oss", "falcon-groups")))
def test_gradients_are_those_of_transformers(family):
    theirs, model = their_model(CONFIGS[family]), FAMILIES[family]
    step = TrainStep(model, Strategy(mesh=make_mesh({}), state="fp32"))
    trained, params = step.shards, read_params(model, arrays(theirs.state_dict().items()))
    if not model.num_experts:  # whose products take no float64; else rounding of transformers is half of the tolerance
        theirs = theirs.double()
    logits = their_logits(theirs).flatten(0, 1)
    expected_loss = torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS, dtype=torch.long).flatten())
    expected_loss.backward()
    stored = theirs.state_dict()  # has no buffer that is made anew, such as gemma's scale of the embeddings
    buffers = ((name, torch.zeros_like(buffer)) for name, buffer in theirs.named_buffers() if name in stored)
    fixed = ((name, torch.zeros_like(p)) for name, p in theirs.named_parameters() if not p.requires_grad)
    moved = ((name, p.grad) for name, p in theirs.named_parameters() if p.requires_grad)
    gradients = arrays((*moved, *fixed, *buffers))
    expected = {n: array for n, array in read_params(model, gradients).items() if n in trained}

    rows = {"tokens": jnp.asarray(TOKENS), "labels": jnp.asarray(LABELS)} | sources_of(model)
    loss, grads = step.gradients(params, rows)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=1e-5)
    largest = max(float(np.abs(array).max()) for array in expected.values())
    for name, array in expected.items():
        # The bias of keys moves every score of a query alike: without rotations its gradient is nothing but rounding.
        scale = max(float(np.abs(array).max()), 1e-3 * largest)
        np.testing.assert_allclose(grads[name], array, rtol=0, atol=1e-5 * scale, err_msg=name)
