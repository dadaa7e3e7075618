"""Worked answers on FLOPs: of products, whole and per device, of training, and of attention against the matrices."""

from meshwright.algebra.blocks import num_devices
from meshwright.algebra.einsum import einsum_steps
from meshwright.algebra.sizes import OpSizes
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.cost.formulas.accounting import attention_equal_len, projection_equal_len, train_flops_per_param
from meshwright.cost.formulas.roofline import Operand, einsum_work
from meshwright.cost.formulas.training_budget import available_flops, training_flops
from meshwright.cost.work.ops import op_flops
from tests.oracles.shapes import dense, two_matmuls
from tests.oracles.worked import Answers, Inputs


def product_flops(text: str, **sizes: int) -> float:
    """FLOPs of an einsum; dims that are not given a size of their own take that of ``all``."""
    lhs, rhs, out = (Operand(array.dims, "bf16") for array in parse_einsum(text))
    every = {dim: sizes.get(dim, sizes.get("all")) for dim in (*lhs.dims, *rhs.dims)}
    return einsum_work((lhs, rhs), out, every).flops


def flops_per_device(i: Inputs) -> float:
    """FLOPs of A[B_X,D_Y] * W[D_Y,F] on one device of the row's mesh, as a fraction of those of the whole product."""
    dims = {"B": 4096, "D": 8192, "F": 16384}
    (step,) = (s for s in einsum_steps(*parse_einsum("A[B_X,D_Y] * W[D_Y,F] -> C[B_X,F]")) if not s.is_collective)
    whole = product_flops("A[B,D] * W[D,F] -> C[B,F]", **dims)
    return op_flops(step, OpSizes(dims=dims, mesh=i["mesh"], state="bf16-adam")) / whole


def layer_flops(i: Inputs) -> float:
    """FLOPs of the layer's forward and backward passes where B = D = F = 1."""
    layer, sizes = two_matmuls({}, {}), OpSizes(dims=dict.fromkeys("BDF", 1), mesh={}, state="bf16-adam")
    return sum(op_flops(step, sizes) for step in (*layer.forward, *layer.backward))


ANSWERS: Answers = {
    "book-4.1-contract": lambda i: product_flops("C[G,H,I,J,K,L] * D[G,H,M,N,K,L] -> O[G,H,I,J,M,N]", all=i["size"]),
    "book-4.3-attn-frac-8k": lambda i: attention_equal_len(dense(D=i["D"])),
    "book-4.3-attn-gemma": lambda i: attention_equal_len(dense(D=i["D"])),
    "book-4.4.2-remat-flops": lambda i: train_flops_per_param(recomputed_forwards=1),
    "book-5.2-flops": layer_flops,
    "book-ex2.4-flops": lambda i: product_flops("x[B,D] * W[D,F] -> y[B,F]", B=1, D=i["D"], F=i["F"]),
    "book-ex4.2-perdev": flops_per_device,
    "book-ex4.2-total": lambda i: flops_per_device(i) * num_devices(i["mesh"]),
    "book-ex4.3": lambda i: product_flops("A[I,J,K,L] * B[I,J,M,N,O] -> C[K,L,M,N,O]", all=i["size"]),
    "book-ex4.5": lambda i: projection_equal_len(dense(D=i["D"])),
    "s000-pfday": lambda i: available_flops(24, 1e15) / 1e15,
    "s001-6nd": lambda i: training_flops(i["params"], i["tokens"]),
}
