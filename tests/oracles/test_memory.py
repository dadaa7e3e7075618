"""Worked answers on memory: training state, activations kept, caches, and tiles."""

from meshwright.algebra.blocks import local_shape
from meshwright.algebra.notation import parse_array
from meshwright.cost.formulas import accounting
from meshwright.cost.formulas.anatomy import tile_expansion
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip, known
from meshwright.spec.model import Model
from tests.oracles.shapes import dense
from tests.oracles.worked import Answers, Inputs

STATES = {8: "pure-16bit", 10: "bf16-adam", 16: "bf16-master", 20: "bf16-master-both-grads"}
"""Bytes per parameter that a row names -> the option with that number."""

STAGES = {"os": 1, "os-g": 2, "os-g-p": 3}
"""What the ZeRO paper splits -> the stage."""


def state(i: Inputs) -> float:
    """Training state of the row's parameters, at the row's bytes per parameter."""
    return accounting.state_bytes(i["params"], state=STATES[i["bytes_per_param"]])


def zero(i: Inputs) -> float:
    """Training state per device under the row's ZeRO stage."""
    return accounting.zero_bytes(i["params"], state="bf16-master", stage=STAGES[i["stage"]], num_shards=i["dp"])


def checkpoints(i: Inputs) -> float:
    """Activations kept where each layer keeps the row's number of results of the model's width."""
    shards = i.get("chips", 1)
    return accounting.saved_bytes(i["tokens"], num_layers=i["L"], width=i["per_layer"] * i["D"], num_shards=shards)


def feed_forward_outputs(i: Inputs) -> float:
    """Activations kept by a remat policy that names the outputs of the feed-forward matmuls."""
    widths = accounting.saved_widths(dense(D=i["D"], F=int(i["F"]), L=i["L"]), ("g", "u"))
    return accounting.saved_bytes(i["B"], num_layers=i["L"], width=sum(widths.values()))


def block_remat(i: Inputs) -> float:
    """Activations kept by block remat."""
    widths = accounting.saved_widths(dense(D=i["D"], L=i["L"]), "block")
    return accounting.saved_bytes(i["tokens"], num_layers=i["L"], width=sum(widths.values()), element_bytes=i["bytes"])


def grouped(i: Inputs) -> tuple[Model, Model]:
    """The same model with a kv head for every query head, and with the row's."""
    return dense(D=5120, N=i["N"], K=i["N"]), dense(D=5120, N=i["N"], K=i["K"])


ANSWERS: Answers = {
    "book-4.4.2-acts-1": block_remat,
    "book-4.4.2-acts-20": checkpoints,
    "book-5.1.1-bytes": lambda i: accounting.bytes_per_param("bf16-adam"),
    "book-5.1.1-maxparams": lambda i: accounting.max_params(known(chip("v5p-book"), "hbm_bytes"), state="bf16-adam"),
    "book-5.4.1-zero-os": zero,
    "book-5.4.1-zero-os-g": zero,
    "book-5.4.1-zero-os-g-p": zero,
    "book-6.2-mem-ckpt": checkpoints,
    "book-6.2-mem-opt": lambda i: accounting.state_bytes(i["params"], state="bf16-adam", part="optimizer"),
    "book-6.2-mem-params": lambda i: accounting.state_bytes(i["params"], state="bf16-adam", part="weights"),
    "book-6.2-mem-total": lambda i: accounting.state_bytes(i["params"], state="bf16-adam") + checkpoints(i),
    "book-6.2-perchip12": lambda i: (
        accounting.state_bytes(i["params"], state="bf16-adam", num_shards=i["chips"]) + checkpoints(i)
    ),
    "book-7.1.6-act": lambda i: accounting.saved_bytes(
        i["tokens"], num_layers=1, width=i["D"], element_bytes=i["bytes"]
    ),
    "book-7.1.6-kv": lambda i: accounting.kv_cache_bytes(load_model("llama2-13b"), i["S"], element_bytes=i["bytes"]),
    "book-7.1.6-weights": lambda i: accounting.state_bytes(i["params"], state="bf16-adam", part="weights"),
    "book-7.2-gqa": lambda i: accounting.kv_cache_bytes(grouped(i)[0], 1) / accounting.kv_cache_bytes(grouped(i)[1], 1),
    "book-9.2.2-pad": lambda i: tile_expansion(i["shape"], i["tile"]),
    "book-ex2.1-bytes-chip": lambda i: accounting.state_bytes(
        i["params"], state="bf16-adam", part="weights", num_shards=i["chips"]
    ),
    "book-ex5.2-acts": feed_forward_outputs,
    "book-ex5.2-state": state,
    "book-ex5.3-acts": feed_forward_outputs,
    "book-ex5.3-total": lambda i: accounting.state_bytes(i["params"], state="bf16-adam") + feed_forward_outputs(i),
    "s000-fsdp-states": lambda i: accounting.state_bytes(i["params"], state="bf16-adam", num_shards=i["devices"]),
    "s001-18B": lambda i: accounting.bytes_per_param("bf16-master-fp32-grads"),
    "s001-mem16-405B": state,
    "s001-mem16-70B": state,
    "s001-mem16-7B": lambda i: accounting.state_bytes(i["params"], state="fp32"),
    "s001-mem20-1B": state,
    "s001-mem20-405B": state,
    "s001-mem20-7B": state,
    "s001-zero": lambda i: local_shape(parse_array("w[D_X]"), {"D": int(i["params"])}, {"X": i["gpus"]})[0],
    "s004-100b": state,
    "s004-10b": lambda i: accounting.max_params(known(chip("h100"), "hbm_bytes"), state="pure-16bit"),
    "s004-1b": state,
    "s004-8B": lambda i: accounting.bytes_per_param("pure-16bit"),
}
