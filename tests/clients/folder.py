"""A tiny llama with random weights, a tokenizer of bytes and pairs that is trained here, and a chat template."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.nn.hf.weights import save_hf
from meshwright.nn.weights import param_shapes
from meshwright.spec.hf.read import model_from_config

ROOT = Path(__file__).parents[2]
NAME = "tiny-llama"
CONFIG = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 768, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 8, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1},
}
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> Tokenizer:
    """A tokenizer of `CONFIG`'s size, trained on the documents of the repository."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    return made


def make_folder(folder: Path) -> Path:
    """Writes the model; returns its folder."""
    model = model_from_config(CONFIG, NAME)
    chance = np.random.default_rng(0)
    params = {
        name: jnp.asarray(("norm" in name) + 0.15 * chance.normal(size=shape.shape), jnp.float32)
        for name, shape in param_shapes(model).items()
    }
    save_hf(model, jax.device_put(params), folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
        **{"model_max_length": CONFIG["max_position_embeddings"], "chat_template": TEMPLATE},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder
