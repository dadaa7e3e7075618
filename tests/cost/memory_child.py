"""Bytes of one device as XLA assigns them, compiled as `train` compiles: python -m tests.cost.memory_child CASE."""

import json
import os
import sys
from typing import Any

from msgspec.structs import replace

from meshwright.spec import catalogue
from meshwright.spec.model import Lora, Model
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
"""Eight devices, and code that is quick to compile: buffers are those of the usual level."""

TINY = catalogue.load_model("tiny")
EXPERTS = replace(
    TINY, family="mixtral", num_layers=4, num_experts=8, experts_per_token=2, d_ff_expert=352, gates_sum_to_one=True
)
WIDE = replace(TINY, num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=1, head_dim=16, vocab_size=262144)
GELU = replace(WIDE, family="gemma", activation="gelu_pytorch_tanh", d_ff=512, tied_embeddings=True)
LORA = replace(WIDE, tied_embeddings=True, lora=Lora(rank=8))

Case = tuple[Model, Strategy, int, int]
"""A model, its strategy, sequences of a step and their length."""


def case(axes: dict[str, int], *, model: Model = TINY, zero: int = 3, seqs: int = 16, **choices: Any) -> Case:
    fields = {"state": "fp32", **choices}
    assignment = standard_assignment(zero=zero)
    seq_len = 64 if model.vocab_size == WIDE.vocab_size else 128
    return model, Strategy(mesh=make_mesh(axes), assignment=assignment, **fields), seqs, seq_len


STAGES: dict[str, Any] = {"axes": {"pipeline": 4, "data": 2}, "zero": 0, "num_microbatches": 8, "seqs": 32}
MESHES: dict[str, Case] = {
    "data": case({"data": 8}, zero=0),
    "bucketed": case({"data": 8}, zero=0, gradient_sync="bucketed"),
    "microbatches": case({"data": 8}, zero=0, num_microbatches=4, seqs=32),
    "ZeRO-1": case({"fsdp": 8}, zero=1),
    "ZeRO-2": case({"fsdp": 8}, zero=2),
    "ZeRO-3": case({"fsdp": 8}),
    "HSDP": case({"data": 2, "fsdp": 4}),
    "tensor": case({"fsdp": 2, "tensor": 4}),
    "three axes": case({"data": 2, "fsdp": 2, "tensor": 2}),
    "ring": case({"fsdp": 2, "context": 4}, context_attention="ring"),
    "ulysses": case({"fsdp": 4, "context": 2}, context_attention="ulysses"),
    "1f1b": case(**STAGES),
    "interleaved": case(**STAGES, schedule="interleaved", chunks=2),
    "zb-h1": case(**STAGES, schedule="zb-h1"),
    "experts": case({"data": 2, "expert": 4}, model=EXPERTS),
}
CASES: dict[str, Case] = {
    **MESHES,
    "rings of tensor": case({"fsdp": 2, "tensor": 4}, collective_matmul="two-way"),
    "16 bits": case({"fsdp": 8}, state="bf16-adam"),
    "one": case({}, seqs=8),
    "one, all kept": case({}, remat="none", seqs=8),
    "one, 16 bits": case({}, state="bf16-adam", seqs=8),
    "large vocabulary": case({}, model=GELU, remat="none", seqs=1),
    "large vocabulary in chunks": case({}, model=WIDE, remat="full", seqs=2),
    "large vocabulary, split": case({"tensor": 4, "fsdp": 2}, model=WIDE, seqs=4),
    "adapters": case({}, model=LORA, seqs=2),
    "adapters, all kept": case({}, model=LORA, remat="none", seqs=2),
}


def main(name: str) -> None:
    """Print the bytes of the arguments and of the temporaries of a case's compiled step."""
    os.environ |= {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    from meshwright.train.settings import TrainSettings, program_options
    from meshwright.train.step import make_step

    model, strategy, batch_seqs, seq_len = CASES[name]
    settings = TrainSettings(balance_loss=0.0)
    options = program_options(settings, strategy, several_documents=False)
    step = make_step(model, strategy, settings, options=options)
    found: Any = step.lower(batch_seqs, seq_len).compile().memory_analysis()
    print(json.dumps([found.argument_size_in_bytes, found.temp_size_in_bytes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
