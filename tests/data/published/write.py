"""Writes the checkpoints beside it with compressed-tensors, and the logits of the weights that it dequantises.

Run by hand with compressed-tensors 0.20.1, transformers 5 and torch: ``python tests/data/published/write.py``.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.apply import apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TOKENS = [[3, 7, 1, 5, 0, 2, 6]]
FLOAT8 = {"num_bits": 8, "type": "float"}
ON_THE_FLY = FLOAT8 | {"strategy": "token", "dynamic": True}
FORMS = {
    "int8": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "int8-asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "fp8": (FLOAT8 | {"strategy": "channel"}, ON_THE_FLY),
    "fp8-tensor": (FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor"}),
    "fp8-block": (FLOAT8 | {"strategy": "block", "block_structure": [12, 16]}, None),
    "int4": ({"num_bits": 4, "strategy": "group", "group_size": 16}, None),
    "int4-asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}, None),
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, None),
    "mxfp4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"}, None),
}


def config(**more):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 16, "num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": True}
    return LlamaConfig(dtype="float32", **sizes | more)


def scaled(module, args):
    """Sets the scales of a matrix from its largest values, as an observer does."""
    weight = module.weight.data
    rows, columns = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        groups = padded.reshape(-(-rows // high), high, -(-columns // wide), wide).permute(0, 2, 1, 3).flatten(2)
    elif args.strategy == "tensor":
        groups = weight.reshape(1, -1)
    else:
        groups = weight.reshape(rows, -1, args.group_size or columns)
    overall = None
    if args.strategy == "tensor_group":
        overall = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(overall)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=overall)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.01)


def main():
    logits = {}
    for name, (weights, activations) in FORMS.items():
        torch.manual_seed(len(name))
        # a scale of mxfp4 has 32 inputs
        plain = LlamaForCausalLM(config(intermediate_size=32) if name == "mxfp4" else config())
        for parameter in plain.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(std=0.3)
        given = activations and QuantizationArgs(**activations)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=given)
        model = LlamaForCausalLM(plain.config)
        model.load_state_dict(plain.state_dict())
        apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
        for module in model.modules():
            if getattr(module, "quantization_scheme", None):
                scaled(module, module.quantization_scheme.weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            compressor.update_config(folder)
            shutil.copy(Path(folder) / "model.safetensors", HERE / f"{name}.safetensors")
            keys = json.loads((Path(folder) / "config.json").read_text())
        (HERE / f"{name}.json").write_text(json.dumps(keys, separators=(",", ":")) + "\n")
        compressor.decompress_model(model)
        floats = {key: value.float() for key, value in model.state_dict().items() if key in plain.state_dict()}
        lost = max((floats[key] - value).abs().max().item() for key, value in plain.state_dict().items())
        assert 0 < lost < 0.5, (name, lost)
        plain.load_state_dict(floats)
        with torch.no_grad():
            logits[name] = plain(torch.tensor(TOKENS)).logits.numpy()
        print(name, f"largest change of a weight {lost:.3g}", compressor.__dict__.get("quantization_config").format)
    np.savez_compressed(HERE / "logits.npz", tokens=np.asarray(TOKENS), **logits)


if __name__ == "__main__":
    main()
