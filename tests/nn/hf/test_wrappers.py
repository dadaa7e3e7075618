"""Decoders of multimodal models against transformers' wrapper classes: logits of text, and names in published files."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.hf.files import open_checkpoint
from meshwright.nn.hf.format import checked_parts, stored_parts
from meshwright.nn.hf.weights import load_params, read_params
from meshwright.spec.hf.families import tables
from meshwright.spec.hf.read import model_from_config
from tests.logits import logits_fn
from tests.nn.families import CONFIGS, VOCAB
from tests.parity import state_of, their_model
from tests.spec.hf.test_wrappers import PLAIN

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]  # the second for the line on other parts
torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 24)).astype(np.int32)
_TEXT = {key: value for key, value in PLAIN.items() if key != "head_dim"} | {"hidden_size": 48}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
_GLM = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}
_GROUPED = {key: value for key, value in CONFIGS["glm4_moe"].items() if key not in ("use_qk_norm", "model_type")}

_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 8}
_DEEP = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14}
_QWEN = _DEEP | {"out_hidden_size": 48, "fullatt_block_indexes": [0]}
_QWEN3 = _DEEP | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8}

WRAPPED = {
    "gemma3": (CONFIGS["gemma3"], {"vision_config": _VISION | {"model_type": "siglip_vision_model"}}),
    "gemma4": (
        CONFIGS["gemma4-shared"] | {"pad_token_id": 0, "use_bidirectional_attention": "vision"},
        {"vision_config": _VISION | {"head_dim": 8, "num_key_value_heads": 2}, "audio_config": None},
    ),
    "glm46v": (_TEXT | _GLM | {"model_type": "glm4v_text"}, {"vision_config": _QWEN | {"model_type": "glm4v_vision"}}),
    "glm4v": (_TEXT | _GLM | {"model_type": "glm4v_text"}, {"vision_config": _QWEN | {"image_size": 28}}),
    "glm4v_moe": (_GROUPED | _GLM | {"model_type": "glm4v_moe_text"}, {"vision_config": _QWEN3 | {"image_size": 28}}),
    "exaone4_5": (CONFIGS["exaone4"], {"vision_config": _QWEN | {"out_hidden_size": 32, "num_key_value_heads": 1}}),
    "idefics3": (PLAIN | {"model_type": "llama"}, {"vision_config": _VISION}),
    "internvl": (
        PLAIN | {"model_type": "qwen3"},
        {"vision_config": _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "kimi_k25": (CONFIGS["deepseek_v3"] | {"attention_bias": False}, {"vision_config": _VISION}),
    "llama4": (
        CONFIGS["llama4"],
        {
            "vision_config": _VISION
            | {f"{name}_dim": 16 for name in ("vision_output", "projector_input")}
            | {"projector_output_dim": 16}
        },
    ),
    "llava": (PLAIN | {"model_type": "llama"}, {"vision_config": _CLIP}),
    "llava_next": (PLAIN | {"model_type": "mistral"}, {"vision_config": _CLIP}),
    "llava_onevision": (
        PLAIN | {"model_type": "qwen2"},
        {"vision_config": _VISION | {"model_type": "siglip_vision_model"}},
    ),
    "mistral3": (
        PLAIN | {"model_type": "mistral", "sliding_window": None},
        {"vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8}},
    ),
    "qwen2_5_omni_thinker": (
        _TEXT | _MROPE | {"model_type": "qwen2_5_omni_text"},
        {"vision_config": _QWEN, "audio_config": _AUDIO | {"output_dim": 48}},
    ),
    "qwen2_5_vl": (_TEXT | _MROPE | {"model_type": "qwen2_5_vl_text"}, {"vision_config": _QWEN}),
    "qwen2_audio": (
        PLAIN | {"model_type": "qwen2"},
        {"audio_config": _AUDIO | {"model_type": "qwen2_audio_encoder"}},
    ),
    "qwen2_vl": (
        _TEXT | _MROPE | {"model_type": "qwen2_vl_text"},
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}},
    ),
    "qwen3_omni_moe_thinker": (
        PLAIN | _ROUTED | _MROPE | {"model_type": "qwen3_omni_moe_text"},
        {"vision_config": _QWEN3, "audio_config": _AUDIO | {"output_dim": 32}},
    ),
    "qwen3_vl": (PLAIN | _MROPE | {"model_type": "qwen3_vl_text"}, {"vision_config": _QWEN3}),
    "qwen3_vl_moe": (PLAIN | _ROUTED | _MROPE | {"model_type": "qwen3_vl_moe_text"}, {"vision_config": _QWEN3}),
    "smolvlm": (PLAIN | {"model_type": "llama"}, {"vision_config": _VISION}),
    "voxtral": (
        PLAIN | {"model_type": "llama"},
        {"audio_config": _VISION | {"model_type": "voxtral_encoder", "intermediate_size": 64}},
    ),
}
"""A wrapper -> the config of its decoder, and those of its other parts."""

QUICK = "qwen3_vl_moe"
SAVED_UNDER_OTHER_NAMES = {"kimi_k25": "layers are saved as blocks", "llava_next": "", "llava_onevision": ""}
"""Wrappers that transformers' save_pretrained does not write as they are published, or not at all."""


def config_of(wrapper):
    text, others = copy.deepcopy(WRAPPED[wrapper])
    return {
        "model_type": wrapper,
        "text_config": text,
        "tie_word_embeddings": wrapper in ("gemma3", "gemma4"),
        **others,
    }


def their_wrapper(wrapper):
    keys = config_of(wrapper)
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in WRAPPED]
)
def test_the_text_half_is_what_transformers_makes_of_it(wrapper, tmp_path):
    theirs, model = their_wrapper(wrapper), model_from_config(config_of(wrapper), wrapper)
    assert model_from_config(theirs.config.to_dict(), wrapper) == model
    params = read_params(model, state_of(theirs))
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    found = np.asarray(jax.jit(logits_fn(model))(params, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    if wrapper in SAVED_UNDER_OTHER_NAMES:
        return

    theirs.save_pretrained(tmp_path)
    assert model_from_config(tmp_path, wrapper) == model
    for name, array in load_params(model, tmp_path).items():
        np.testing.assert_array_equal(params[name], array)
    if wrapper != QUICK:  # whose experts are published one way round and saved the other
        with open_checkpoint(tmp_path) as tensors:
            assert {part.tensor for part in stored_parts(model)} <= set(tensors)


def test_stacked_experts_are_read_with_inputs_before_outputs():
    """As Qwen publishes them, in a model where gate and up together are as wide as the stream: a square."""
    config = config_of(QUICK)
    config["text_config"]["moe_intermediate_size"] = 16
    model = model_from_config(config, QUICK)
    shapes = {"gate_up_proj": (4, 32, 32), "down_proj": (4, 16, 32)}
    draws = np.random.default_rng(0)
    tensors = {part.tensor: draws.random(part.shape, np.float32) for part in stored_parts(model)}
    tensors = {name: array for name, array in tensors.items() if ".experts." not in name}
    prefix = "model.language_model.layers.{}.mlp.experts."
    for layer in range(model.num_layers):
        for name, shape in shapes.items():
            tensors[prefix.format(layer) + name] = draws.random(shape, np.float32)
    params = read_params(model, tensors)
    gate_up, down = (tensors[prefix.format(1) + name] for name in shapes)
    np.testing.assert_array_equal(params["experts_w_gate"][1], gate_up[..., :16])
    np.testing.assert_array_equal(params["experts_w_up"][1], gate_up[..., 16:])
    np.testing.assert_array_equal(params["experts_w_down"][1], down)
    assert checked_parts(model, tensors)


def test_the_text_half_of_gemma3n_is_read_from_among_its_other_parts():
    """Its class in transformers needs timm, for the images: names are those of the class's modules."""
    keys = {"model_type": "gemma3n", "text_config": CONFIGS["gemma3n"], "vision_config": {"hidden_size": 8}}
    model = model_from_config(keys, "gemma3n")
    state = state_of(their_model(CONFIGS["gemma3n"]))
    names = (f"model.{part}.weight" for part in ("vision_tower.timm_model.a", "audio_tower.b", "embed_vision.c"))
    nested = {name.replace("model.", "model.language_model.", 1): array for name, array in state.items()}
    params = read_params(model, nested | dict.fromkeys((*names, "model.embed_audio.d.weight"), np.ones((2, 2))))
    plain = read_params(model_from_config(CONFIGS["gemma3n"], "gemma3n"), state)
    assert params.keys() == plain.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(params[name], array)


def test_every_wrapper_is_compared_but_those_with_another_in_them():
    """Whole Omni models have the thinker of the case in them; Kimi VL's code is not in transformers, nor is timm there,
    which Gemma 3n's needs."""
    others = {"qwen2_5_omni", "qwen3_omni_moe", "kimi_vl", "gemma3n"}
    assert tables()["wrappers"].keys() - WRAPPED.keys() == others
