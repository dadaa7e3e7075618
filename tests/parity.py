"""A family against transformers on a mesh: logits, three AdamW steps, the weights written back, greedy text.

Random weights everywhere, float32; what a mesh or a shape does not support is an outcome in words.
"""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.algebra.generation.program import Storage
from meshwright.algebra.notation import check
from meshwright.algebra.rewrites.pipeline import no_stages
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import UserError
from meshwright.nn.hf.weights import read_params, save_hf
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.parallel.train_step import State, TrainStep
from meshwright.serve.offline.generate import as_requests, generate
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import FAMILIES, Model
from meshwright.spec.strategy import Strategy, held_dims, make_mesh
from tests.logits import logits_fn
from tests.nn.families import CONFIGS
from tests.parallel.generate_cases import engine_on, logits_after

__all__ = ["FAMILIES", "MESHES", "SHAPES", "Outcome", "run"]

ROWS, LENGTH, PROMPT, NUM_TOKENS, NUM_STEPS = 8, 32, 20, 6, 3
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
RATE = 1e-3

MESHES: dict[str, dict[str, Any]] = {
    "one device": {"axes": {}},
    "data 2, fsdp 2, tensor 2": {"axes": {"data": 2, "fsdp": 2, "tensor": 2}},
    "fsdp 2, context 2, tensor 2": {"axes": {"fsdp": 2, "context": 2, "tensor": 2}, "context_attention": "gather"},
    "pipeline 2, data 2, tensor 2": {"axes": {"pipeline": 2, "data": 2, "tensor": 2}, "num_microbatches": 2},
}
"""Meshes of the table: one device, and three of eight."""

PIPELINE = "pipeline 2, data 2, tensor 2"
BASE = tuple(name for name in MESHES if name != PIPELINE)
"""Meshes of the shape that a case has; of the pipeline the further shapes."""

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "one kv head": ({"num_key_value_heads": 1}, "data 2, fsdp 2, tensor 2"),
    "vocabulary 50257": ({"vocab_size": 50257}, "data 2, fsdp 2, tensor 2"),
    "4 layers, 2 stages": ({"num_hidden_layers": 4}, PIPELINE),
    "7 layers, 2 stages": ({"num_hidden_layers": 7}, PIPELINE),
}
"""Further shapes: keys of the config, and the mesh that they are trained on. Positions of every case are far beyond the
context that its rope was stretched from, where it is stretched."""


STACKS = {"decoder_layers": "encoder_layers", "num_decoder_layers": "num_layers"}
"""Keys for the layers of a decoder, and for those of the encoder beside it."""


def shapes_of(case: str) -> dict[str, str]:
    """Further shapes of a case and their meshes; layers that share results do not run in pipelines."""
    mesh_of = {name: mesh for name, (_, mesh) in SHAPES.items()}
    if "num_key_value_heads" not in CONFIGS[case]:
        del mesh_of["one kv head"]
    has_no_stages = no_stages(transformer(model_of(case)))
    return {name: mesh for name, mesh in mesh_of.items() if not (has_no_stages and mesh == PIPELINE)}


# The frequencies of dynamic scaling follow the length of what is there: in transformers the present one of a text that
# grows, here the longest that the cache has room for.
CHANGED = {"qwen2": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 64}}


_BUFFERS = ("correction_bias", "layer_scalar", "logits_bias")
"""Ends of the names of buffers that checkpoints hold."""


class Outcome(NamedTuple):
    """Greatest differences, over the largest entry; None where the mesh does not do it. ``refused`` is why not."""

    logits: float | None = None
    losses: float | None = None
    weights: float | None = None
    is_written_back: bool | None = None
    is_same_text: bool | None = None
    refused: str = ""


def config_of(case: str, shape: str = "") -> dict[str, Any]:
    """The config of a case in an odd shape."""
    config = {**CONFIGS[case], **CHANGED.get(case, {})}
    given = dict(SHAPES[shape][0]) if shape else {}
    if "n_embd" in config:
        given = {{"num_hidden_layers": "n_layer"}.get(key, key): value for key, value in given.items()}
    for key in STACKS.keys() & config.keys():
        if num_layers := given.pop("num_hidden_layers", None):
            given |= {key: num_layers, STACKS[key]: num_layers + 1}
    if "kv_lora_rank" in config or "num_key_value_heads" not in config:
        given.pop("num_key_value_heads", None)  # others have as many as heads, or their own key
    if "vocab_size_per_layer_input" in config and "vocab_size" in given:
        given["vocab_size_per_layer_input"] = given["vocab_size"]
    for key, value in given.items():
        if key == "num_hidden_layers":
            for lists in {"layer_types", "no_rope_layers", "mlp_layer_types", "moe_topk"} & config.keys():
                config[lists] = (list(config[lists])[:2] * value)[:value]
        config[key] = value
    return config


def model_of(case: str, shape: str = "") -> Model:
    """The model of a case."""
    return model_from_config(config_of(case, shape), case)


def theirs_of_case(case: str, shape: str = "") -> "Theirs":
    """What transformers makes of a case."""
    return theirs_of(config_of(case, shape), model_of(case, shape))


def auto_class(family: str) -> Any:
    """The class of transformers that makes a model of the family with its head."""
    import transformers

    auto = transformers.models.auto.modeling_auto
    if family in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return transformers.AutoModelForSpeechSeq2Seq
    if family == "mistral4":  # counted among those of images
        return transformers.AutoModelForMultimodalLM
    is_pair = family in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM


def their_model(config: Mapping[str, Any]) -> Any:
    """The model of transformers with random values everywhere, so that no bias, norm or sink hides."""
    import torch
    import transformers

    keys = copy.deepcopy(dict(config))  # transformers writes into the tables of rope
    torch.manual_seed(0)
    found = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    model = auto_class(config["model_type"]).from_config(found, attn_implementation="eager").eval()
    if found.is_encoder_decoder and config.get("tie_word_embeddings") is False:  # T5's class ties it in any case
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.all_tied_weights_keys.pop("lm_head.weight", None)
    drawn = [parameter for parameter in model.parameters() if parameter.requires_grad]
    drawn += [buffer for name, buffer in model.named_buffers() if name.endswith(_BUFFERS)]
    for parameter in drawn:
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def state_of(theirs: Any) -> dict[str, np.ndarray]:
    """A state dict as NumPy arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in theirs.state_dict().items()}


class Theirs(NamedTuple):
    """What transformers makes of a case."""

    weights: dict[str, np.ndarray]
    logits: np.ndarray
    text: list[list[int]]
    losses: list[float]
    trained: dict[str, np.ndarray]


def tokens_of(model: Model) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.vocab_size, (NUM_STEPS, ROWS, LENGTH + 1)).astype(np.int32)


def sources_of(model: Model, number: int) -> dict[str, np.ndarray]:
    """What the encoder of a model reads in a step, by the name in a batch; {} for a decoder."""
    if not model.encoder:
        return {}
    draw, encoder = np.random.default_rng(100 + number), model.encoder
    if encoder.features:
        features = draw.normal(size=(ROWS, encoder.features, 2 * encoder.length))
        return {"encoder_features": features.astype(np.float32)}
    return {"encoder_tokens": draw.integers(0, model.vocab_size, (ROWS, model.encoder.length)).astype(np.int32)}


def theirs_of(config: Mapping[str, Any], model: Model) -> Theirs:
    import torch

    theirs, batches = their_model(config), torch.tensor(tokens_of(model), dtype=torch.long)
    weights, prompts = state_of(theirs), batches[0, :, :PROMPT]
    sources = [{name: torch.tensor(array) for name, array in sources_of(model, n).items()} for n in range(NUM_STEPS)]

    def logits_of(n: int, tokens: Any) -> Any:
        """Of an encoder-decoder with the sources of a step."""
        names = {"encoder_tokens": "input_ids", "encoder_features": "input_features"}
        given = {names[name]: array for name, array in sources[n].items()}
        return theirs(**given, decoder_input_ids=tokens).logits if given else theirs(tokens).logits

    with torch.no_grad():
        logits, text = logits_of(0, batches[0, :, :-1]).numpy(), prompts
        length = {"max_new_tokens": NUM_TOKENS}
        theirs.generation_config.update(eos_token_id=None, forced_eos_token_id=None, forced_bos_token_id=None)
        if model.encoder:
            prompts = sources[0].get("encoder_tokens", prompts).long()
            length["decoder_start_token_id"] = model.encoder.start_token
        if "encoder_features" not in sources[0]:
            text = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **length)
    beta = (ADAMW["b1"], ADAMW["b2"])
    step = torch.optim.AdamW(
        theirs.parameters(), lr=RATE, betas=beta, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"]
    )
    losses = []
    for number, rows in enumerate(batches):
        step.zero_grad()
        found = logits_of(number, rows[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, rows[:, 1:].flatten())
        loss.backward()
        step.step()
        losses.append(float(loss.detach()))
    return Theirs(weights, logits, text[:, -NUM_TOKENS:].tolist(), losses, state_of(theirs))


def difference(found: Any, expected: Any) -> float:
    """The greatest difference over the largest entry."""
    expected = np.asarray(expected)
    return float(np.abs(np.asarray(found) - expected).max() / max(np.abs(expected).max(), 1e-30))


def run(case: str, mesh: str, shape: str = "", *, theirs: Theirs | None = None) -> Outcome:
    """One case on one mesh."""
    model, theirs = model_of(case, shape), theirs or theirs_of_case(case, shape)
    choices = dict(MESHES[mesh])
    strategy = Strategy(mesh=make_mesh(choices.pop("axes")), state="fp32", **choices)
    try:
        outcome = _trained(model, strategy, theirs)
        return outcome if shape else _generated(model, strategy, theirs, outcome)
    except UserError as error:
        return Outcome(refused=str(error))


def _trained(model: Model, strategy: Strategy, theirs: Theirs) -> Outcome:
    step = TrainStep(model, strategy, optimizer=optax.adamw(RATE, **ADAMW))
    for name in step.shards:
        check(step.declared.declared[name], held_dims(model.dims, strategy.mesh), strategy.mesh)
    params = step.from_canonical(read_params(model, theirs.weights))
    params = jax.device_put(params, step.state_shardings.params)
    state, losses = State(params, step.init_optimizer(params)), []
    for number, rows in enumerate(tokens_of(model)):
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]} | sources_of(model, number)
        state, metrics = step.step(state, batch)
        losses.append(float(metrics.loss))
    trained = step.to_canonical(state.params)
    expected = read_params(model, theirs.trained)
    largest = max(difference(trained[name], array) for name, array in expected.items())
    return Outcome(
        losses=difference(losses, theirs.losses), weights=largest, is_written_back=_comes_back(model, trained)
    )


def _comes_back(model: Model, params: Mapping[str, Any]) -> bool:
    """True if transformers reads what is written, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, dict(params), Path(folder))
        back = auto_class(model.family).from_pretrained(folder, attn_implementation="eager")
        found = read_params(model, state_of(back))
    return all(np.array_equal(np.asarray(found[name]), np.asarray(array)) for name, array in params.items())


def _generated(model: Model, strategy: Strategy, theirs: Theirs, outcome: Outcome) -> Outcome:
    """Adds logits and text: on a mesh those after each row, on one device those of every position too."""
    params, tokens = read_params(model, theirs.weights), tokens_of(model)[0]
    alone = 0.0
    if not strategy.active_axes:
        given = {name: jnp.asarray(array) for name, array in sources_of(model, 0).items()}
        alone = difference(jax.jit(logits_fn(model))(params, jnp.asarray(tokens[:, :-1]), **given), theirs.logits)
    if model.encoder:
        outcome = outcome._replace(logits=None if strategy.active_axes else alone)
    if model.encoder and model.encoder.features:
        return outcome
    storage = Storage(cache_dtype="fp32", page_len=8)
    step = PackedStep(model, strategy, max_len=LENGTH + 8, max_seqs=ROWS, storage=storage)
    placed = step.place(params)
    prompts = sources_of(model, 0)["encoder_tokens"] if model.encoder else tokens[:, :PROMPT]
    text = generate(engine_on(step, placed), as_requests(prompts.tolist(), max_tokens=NUM_TOKENS)).completions
    outcome = outcome._replace(is_same_text=[list(one.tokens) for one in text] == theirs.text)
    if model.encoder:
        return outcome
    found = logits_after(step, placed, tokens[:, :-1])
    return outcome._replace(logits=max(alone, difference(found, theirs.logits[:, -1])))
