"""Models of a given size in the proportions of Llama 3."""

from meshwright.core.errors import InputError
from meshwright.core.units import format_params, parse_count
from meshwright.spec.model import Model
from meshwright.spec.weights import num_params

HEAD_DIM = 128
KV_HEADS = 8
VOCAB_SIZE = 128_256
FF_OVER_WIDTH = 3.5
WIDTH_OVER_LAYERS = 128
"""Llama 3: 4096 / 32 in 8B, 8192 / 80 in 70B, 16384 / 126 in 405B."""
TIED_BELOW = 4e9
"""Parameters below which input and output embedding are one table, as in Llama 3.2 1B and 3B."""
SMALLEST, LARGEST = 5e8, 1e14


def llama_like(size: str) -> Model:
    """Returns a dense model of about ``size`` parameters (``"7B"``), in the proportions of Llama 3.

    D / L is near 128 and F = 3.5 D. The width is a multiple of 1024 (8 kv heads of 128), of 2048 from 8192 on; the
    layers, in fours from 16 on so that stages can share them, make up the count to a few percent.
    """
    wanted = parse_count(size, what="size")
    if not SMALLEST <= wanted <= LARGEST:
        raise InputError(f"size {size} is out of range. Give 500M to 100T parameters, such as 7B.")
    tied = wanted < TIED_BELOW
    found = []
    for width in (*range(1024, 8192, 1024), *range(8192, 2**18, 2048)):
        layers = (wanted - (2 - tied) * VOCAB_SIZE * width) / _layer_params(width)
        layers = round(layers) if layers < 16 else 4 * round(layers / 4)
        if layers >= 1:
            # a model that is twice too wide is as far off as one that is twice too deep
            ratio = width / layers / WIDTH_OVER_LAYERS
            found.append((max(ratio, 1 / ratio), width, layers))
    _, width, layers = min(found)
    return Model(
        name=f"llama-{size}",
        family="llama",
        num_layers=layers,
        d_model=width,
        d_ff=round(FF_OVER_WIDTH * width),
        num_heads=width // HEAD_DIM,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        tied_embeddings=tied,
        max_positions=131_072,
        rope_theta=5e5,
    )


def _layer_params(width: int) -> float:
    return width * (2 * width + 2 * KV_HEADS * HEAD_DIM + 3 * FF_OVER_WIDTH * width + 2)


def describe(model: Model) -> str:
    """Returns ``"llama-7B: 7.16 B parameters, 28 layers of width 4,096"``; "" for a model that is not of this kind."""
    if not model.name.startswith("llama-"):
        return ""
    size = format_params(num_params(model))
    return f"{model.name}: {size} parameters, {model.num_layers} layers of width {model.d_model:,}"
