import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.ops.layer_norm import layer_norm, layer_norm_backward
from meshwright.nn.ops.rms_norm import RmsForm, rms_form, rms_norm, rms_norm_backward
from meshwright.spec import catalogue
from tests.nn.arrays import close

FORMS = [RmsForm(1e-5), RmsForm(1e-6, unit_offset=True, wide_scale=True), RmsForm(1e-5, wide_scale=True)]


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("form", FORMS)
def test_rms_norm_is_the_formula(form):
    x, scale = arrays((2, 3, 4, 6), (6,))
    wide = np.asarray(x, np.float64)
    factor = np.asarray(scale, np.float64) + (1 if form.unit_offset else 0)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + form.eps) * factor
    close(rms_norm(x, scale, form), expected, 1e-6)


def test_layer_norm_has_scales_of_each_head_one_plus_the_scale_and_no_bias():
    x, scale, dout = arrays((2, 3, 4, 6), (4, 6), (2, 3, 4, 6))
    form, wide = RmsForm(1e-5, unit_offset=True), np.asarray(x, np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    close(layer_norm(x, scale, None, form), normed * (1 + np.asarray(scale, np.float64)), 1e-6)
    expected = jax.vjp(lambda *a: layer_norm(*a, None, form), x, scale)[1](dout)
    all_close(layer_norm_backward(dout, x, scale, form)[:2], expected)


def test_layer_norm_is_the_formula():
    x, scale, bias = arrays((2, 3, 6), (6,), (6,))
    wide = np.asarray(x, np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    expected = normed * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
    close(layer_norm(x, scale, bias, RmsForm(1e-5)), expected, 1e-6)


def all_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_backward_of_rms_norm_is_that_of_autodiff(form):
    x, scale, dout = arrays((2, 3, 6), (6,), (2, 3, 6))
    all_close(rms_norm_backward(dout, x, scale, form), jax.vjp(lambda *a: rms_norm(*a, form), x, scale)[1](dout))


def test_backward_of_layer_norm_is_that_of_autodiff():
    x, scale, bias, dout = arrays((2, 3, 6), (6,), (6,), (2, 3, 6))
    expected = jax.vjp(lambda *a: layer_norm(*a, RmsForm(1e-5)), x, scale, bias)[1](dout)
    all_close(layer_norm_backward(dout, x, scale, RmsForm(1e-5)), expected)


def test_the_form_is_that_of_the_family():
    assert rms_form(catalogue.load_model("llama3-8b")) == RmsForm(1e-5)
    assert rms_form(catalogue.load_model("gemma2-9b")) == RmsForm(1e-6, unit_offset=True, wide_scale=True)
    assert rms_form(catalogue.load_model("gpt-oss-20b")) == RmsForm(1e-5, wide_scale=True)
    assert rms_form(catalogue.load_model("deepseek-v2"), latent=True).eps == 1e-6


@pytest.mark.peer
@pytest.mark.parametrize(
    ("module", "name", "model"),
    [
        ("llama", "LlamaRMSNorm", "llama3-8b"),
        ("gemma2", "Gemma2RMSNorm", "gemma2-9b"),
        ("gpt_oss", "GptOssRMSNorm", "gpt-oss-20b"),
    ],
)
def test_casts_come_in_the_order_of_transformers(module, name, model):
    """In bf16 a cast in another place shows in the last bit."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    pytest.importorskip("transformers")
    from importlib import import_module

    theirs = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    form = rms_form(catalogue.load_model(model))
    x, scale = arrays((64, 32), (32,), seed=1)
    norm = theirs(32, eps=form.eps).to(torch.bfloat16)
    norm.weight.data = torch.tensor(np.asarray(scale)).to(torch.bfloat16)
    expected = norm(torch.tensor(np.asarray(x)).to(torch.bfloat16)).detach().float().numpy()
    found = rms_norm(x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16), form)
    # The sum of squares is added in another order, which may change a rounding now and then.
    assert np.mean(np.asarray(found, np.float32) != expected) < 0.005
