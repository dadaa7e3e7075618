"""Worked answers on sharding: local shapes, bytes, and the collectives that a product or a change of sharding needs."""

from meshwright.algebra.blocks import bytes_per_device, bytes_total, local_shape, num_devices
from meshwright.algebra.derive import derive
from meshwright.algebra.einsum import einsum_steps, local_product, reshard
from meshwright.algebra.notation import ShardedArray, local_elements, parse_array
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import parse_block
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.spec.strategy import Strategy
from tests.oracles.worked import Answers, Inputs


def short(step: Step) -> str:
    """``AllReduce_Y(C)`` of ``C[B_X, F] = AllReduce_Y(C[B_X, F]{U_Y})``."""
    return f"{collective(step)}({step.inputs[0].name})"


def collective(step: Step) -> str:
    """``AllReduce_Y`` of such a step."""
    return str(step).split(" = ")[1].split("(")[0]


def collectives(i: Inputs) -> list[str]:
    """The collectives of the row's product, in order."""
    steps = einsum_steps(*parse_einsum(f"{i['a']} * {i['b']} -> {i['out']}"))
    return [short(step) for step in steps if step.is_collective]


def local_result(i: Inputs, out: str) -> str:
    """The sharding of the local product of the row's operands, dims of the result given."""
    lhs, rhs, result = parse_einsum(f"{i['a']} * {i['b']} -> {out}")
    return str(local_product(lhs, rhs, result))


def only_step(array: ShardedArray, target: ShardedArray) -> Step:
    """The one step from a sharding to another."""
    (step,) = reshard(array, target)
    return step


def result_of_gather(i: Inputs) -> str:
    """The array once every axis is gathered, if that takes the row's collective."""
    array = parse_array(i["spec"])
    step = only_step(array, array.resharded(dict.fromkeys(array.dims, ())))
    assert collective(step) == i["op"]
    return str(step.result)


def result_of_all_to_all(i: Inputs) -> str:
    """The array once its axis stands on the dim that the collective names, if that takes one all-to-all."""
    array = parse_array(i["spec"])
    axis, to_dim = i["op"].removeprefix("AllToAll_").split(",")
    (step,) = reshard(array, array.resharded({array.dim_on(axis): (), to_dim: (axis,)}))
    assert collective(step) == f"AllToAll_{axis}:{array.dim_on(axis)}->{to_dim}"
    return str(step.result)


def backward_of_gather(i: Inputs) -> str:
    """What the derived backward pass does to the gradient of a weight that the forward pass gathers."""
    variables = {"w": Variable("w", ("D", "F"), "weight")}
    block = parse_block("layer", "y[B,F] = x[B,D] * w[D,F]", variables)
    axis = i["op"].removeprefix("AllGather_")
    strategy = Strategy(mesh={axis: 2}, assignment={"activation": {"B": (axis,)}, "weight": {"D": (axis,)}})
    (layer,) = derive(Program((block,), variables), strategy).blocks
    assert [short(step) for step in layer.forward if step.is_collective] == [f"{i['op']}(w)"]
    (back,) = [step for step in layer.backward if step.is_collective and step.result.name == "dw"]
    return collective(back)


def shape_of(i: Inputs) -> tuple[int, ...]:
    """Local shape of the row's array on its mesh."""
    array = parse_array(i["spec"])
    return local_shape(array, dict(zip(array.dims, i["shape"], strict=True)), i["mesh"])


def total_over_one_copy(i: Inputs) -> float:
    """Bytes over all devices over those of one copy, for an array that is split over the row's axes alone."""
    dims = {"I": 4096}
    one = bytes_total(parse_array("A[I]"), dims, {}, element_bytes=2)
    return bytes_total(parse_array(f"A[I_{i['axes']}]"), dims, i["mesh"], element_bytes=2) / one


def bytes_of(i: Inputs, measure) -> float:
    """Bytes of the row's array by one of the two measures."""
    array = parse_array(i["spec"])
    dims = dict(zip(array.dims, i["shape"], strict=True))
    return measure(array, dims, i["mesh"], element_bytes=i["bytes"])


PRODUCTS = (
    "book-10.1.1-comm",
    "book-10.2-rs-comm",
    "book-3.2-case1a",
    "book-3.2-case1b",
    "book-3.2-case1c",
    "book-3.2-case1d",
    "book-3.2-case2",
    "book-3.2-case3-rs",
    "book-3.2-case4-gatherA",
    "book-3.2-case4-gatherB",
    "book-5.1.1-dp-bwd-comm",
    "book-5.1.2-fsdp-bwd-comm",
    "book-5.1.2-fsdp-fwd1-comm",
    "book-5.1.3-tp-fwd1-comm",
    "book-5.1.3-tp-fwd2-comm",
    "book-5.1.4-mix-fwd1-comm",
    "book-7.3.3-wo-comm",
    "book-7.7-step2-comm",
    "book-ex3.6-1",
    "book-ex3.6-main",
)

ANSWERS: Answers = {
    **dict.fromkeys(PRODUCTS, collectives),
    "book-3.1-fig7": shape_of,
    "book-3.1-quiz-local": shape_of,
    "book-3.1-quiz-total": lambda i: bytes_of(i, bytes_total),
    "book-3.1.2-A": shape_of,
    "book-3.1.2-B": shape_of,
    "book-3.2-ag-spec": result_of_gather,
    "book-3.2-out-unreduced": lambda i: local_result(i, "C[I,K]"),
    "book-3.2-out-x": lambda i: local_result(i, "C[I,K]"),
    "book-3.2-out-y": lambda i: local_result(i, "C[I,K]"),
    "book-3.3.1-a2a-spec": result_of_all_to_all,
    "book-3.3.2-ag-vjp": backward_of_gather,
    "book-9.2.4-bs": lambda i: local_elements(
        parse_array("In[B_X,T]"), {"B": i["batch"], "T": i["seq"]}, {"X": i["dp"]}
    ),
    "book-9.2.4-shard": lambda i: bytes_per_device(
        parse_array("x[B,T,D]"), dict(zip("BTD", i["shape"], strict=True)), {}, element_bytes=i["bytes"]
    ),
    "book-ex3.1": total_over_one_copy,
    "s000-local": shape_of,
    "s000-mesh64": lambda i: num_devices(i["mesh"]),
    "s000-quick-perdev": lambda i: bytes_of(i, bytes_per_device),
}
