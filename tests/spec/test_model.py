"""The Model: its dims, what it refuses, and which models run here."""

import json
import subprocess
import sys

import msgspec
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec import catalogue
from meshwright.spec.model import Model, RopeScaling, require_runnable

SIZES = {
    "name": "toy",
    "family": "llama",
    "num_layers": 2,
    "d_model": 64,
    "d_ff": 96,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
}


def test_dims_of_a_dense_model():
    dims = Model(**SIZES).dims
    assert {dim: dims.pop(dim) for dim in ("Dg", "Fg", "Hg")} == {"Dg": 64 // 64, "Fg": 96 // 32, "Hg": 8 // 8}
    assert dims == {"D": 64, "F": 96, "N": 8, "K": 2, "G": 4, "H": 8, "V": 128, "L": 2}


def test_dims_of_latent_attention_and_experts():
    dims = catalogue.load_model("deepseek-v3").dims
    assert {key: dims[key] for key in ("E", "Fe", "Fs", "Rq", "Rkv", "H", "Hn", "Hr", "Hv")} == {
        "E": 256,
        "Fe": 2048,
        "Fs": 2048,
        "Rq": 1536,
        "Rkv": 512,
        "H": 192,
        "Hn": 128,
        "Hr": 64,
        "Hv": 128,
    }


def test_learned_positions_are_a_dim():
    assert catalogue.load_model("gpt2").dims["P"] == 1024


def test_attention_scale_follows_the_head_or_the_stated_scalar():
    assert catalogue.load_model("llama3-8b").attention_scale == pytest.approx(128**-0.5)
    assert catalogue.load_model("gemma2-27b").attention_scale == pytest.approx(1 / 12)


def test_moe_layers_leave_out_the_dense_ones():
    assert catalogue.load_model("deepseek-v2").moe_layers == tuple(range(1, 60))
    assert catalogue.load_model("llama3-8b").moe_layers == ()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_kv_heads": 3}, "toy: num_kv_heads=3 does not divide num_heads=8. Use a divisor of 8."),
        ({"num_layers": 0}, "toy: num_layers=0 must be at least 1."),
        ({"num_experts": 4, "experts_per_token": 2}, "toy: d_ff_expert=0 must be at least 1."),
        (
            {"num_experts": 4, "experts_per_token": 5, "d_ff_expert": 16},
            "toy: experts_per_token=5 of num_experts=4. Use 1 to 4.",
        ),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(change, text):
    with pytest.raises(InputError) as caught:
        Model(**SIZES | change)
    assert str(caught.value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize(
    "field",
    [
        *("rope_theta", "rope_local_theta", "rope_fraction", "norm_eps", "attention_softcap", "logit_softcap"),
        *("query_pre_attn_scalar", "routed_scale"),
    ],
)
def test_figures_that_no_model_has_are_refused_in_one_line(field, value):
    with pytest.raises(InputError, match=rf"^toy: {field} is {value:g}, give a [^\n]*$"):
        Model(**SIZES | {field: value})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"factor": float("nan")}, "factor is nan, give a positive number"),
        ({"factor": 0.0}, "factor is 0, give a positive number"),
        ({"attention_factor": -1.0}, "attention_factor is -1, give a positive number"),
        ({"long_factor": (1.0, float("inf"))}, "long_factor.1 is inf, give a positive number"),
    ],
)
def test_figures_of_rotary_scaling_are_checked_too(scaling, words):
    with pytest.raises(InputError, match=f"^toy: rope_scaling.{words}$"):
        Model(**SIZES, rope_scaling=RopeScaling(kind="yarn", **scaling))
    Model(**SIZES, rope_scaling=RopeScaling(kind="yarn", factor=4.0, mscale=0.0, mscale_all_dim=0.0))


def test_a_fraction_is_a_share():
    with pytest.raises(InputError, match=r"^toy: rope_fraction is 1.5, give a share in \(0, 1\]$"):
        Model(**SIZES | {"rope_fraction": 1.5})


@pytest.mark.parametrize("name", catalogue.models())
def test_every_model_runs(name):
    assert catalogue.load_model(name).runs_here


def test_an_activation_that_does_not_run_is_named():
    with pytest.raises(CannotRunError, match="activation mish"):
        require_runnable(Model(**SIZES | {"activation": "mish"}))


@pytest.mark.parametrize("name", ["llama3-405b", "deepseek-v3", "gemma3-27b"])
def test_models_survive_json(name):
    model = catalogue.load_model(name)
    assert msgspec.convert(json.loads(msgspec.json.encode(model)), Model) == model


def test_models_are_frozen():
    with pytest.raises(AttributeError):
        Model(**SIZES).num_layers = 3


def test_reading_a_model_imports_no_heavy_package():
    script = (
        "import sys; from meshwright.spec.catalogue import load_model; from meshwright.spec.weights import num_params;"
        "num_params(load_model('llama3-8b'));"
        "print([name for name in ('jax', 'torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_groups": 3},
        {"groups_per_token": 5},
        {"groups_per_token": 0},
        {"experts_per_token": 5},
    ],
)
def test_groups_of_experts_suit_the_experts(changes):
    experts = {"num_experts": 8, "experts_per_token": 2, "d_ff_expert": 4, "expert_groups": 4, "groups_per_token": 2}
    Model(**SIZES | experts)
    with pytest.raises(InputError, match=r"^toy: expert_groups=\d and groups_per_token=\d do not suit num_experts=8"):
        Model(**SIZES | experts | changes)
    with pytest.raises(CannotRunError, match="groups of one expert, but the best two experts of a group rank it"):
        require_runnable(Model(**SIZES | experts | {"expert_groups": 8, "router_scores": "sigmoid"}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_dim": 15}, r"rope rotates pairs, and head_dim=15 is odd\. Use an even number"),
        ({"head_dim": 10, "rope_fraction": 0.5}, "head_dim=10 times rope_fraction=0.5 is odd"),
        ({"head_dim": 15, "unrotated_layers": (0,)}, "head_dim=15 is odd"),
        ({"head_dim": 15, "unrotated_layers": (0, 1)}, None),
        ({"head_dim": 15, "learned_positions": True}, None),
    ],
)
def test_rope_needs_an_even_width(fields, said):
    if said is None:
        assert Model(**SIZES | fields).rotated_width in (0, 15)
        return
    with pytest.raises(InputError, match=said):
        Model(**SIZES | fields)
