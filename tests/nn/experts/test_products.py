"""Products in blocks, over slots of which many are empty and over packed tokens, against NumPy's per expert."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import products as experts_products
from meshwright.nn.experts import slots as experts
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops import local_steps
from meshwright.nn.ops.einsum import contract_step
from meshwright.nn.ops.silu_mul import over_slots
from tests.nn.arrays import close, draw

ROWS, WIDTH, OUT = 23, 5, 4
SIZES = np.array([0, 9, 1, 0, 13], np.int32)
EXPERTS = len(SIZES)
MODEL = SimpleNamespace(num_experts=EXPERTS, experts_per_token=2)


def parts(rows):
    return np.split(rows, np.cumsum(SIZES)[:-1])


def blocks_of(slots, *, block_rows, at_once):
    """Blocks made small, as many at once as a test asks for."""
    return experts_products.blocks_of(slots, MODEL, block_rows=block_rows)._replace(at_once=at_once)


@pytest.mark.parametrize(("block_rows", "at_once"), [(4, 1), (64, 1), (4, 2), (2, 3), (1, 64)])
def test_packed_rows_meet_their_own_expert(block_rows, at_once):
    """Blocks that reach past their expert's rows or the end of the array, experts without rows."""
    x, dy, w = draw(ROWS, WIDTH), draw(ROWS, OUT), draw(EXPERTS, WIDTH, OUT)

    @jax.jit
    def run(x, dy, w, sizes):
        x, dy = Ragged(x, sizes[None]), Ragged(dy, sizes[None])
        blocks = blocks_of(x, block_rows=block_rows, at_once=at_once)
        return (
            experts_products.slot_product(x, w, blocks).rows,
            experts_products.slot_product(dy, w, blocks, transposed=True).rows,
            experts_products.slot_weight_gradient(x, dy, blocks),
        )

    y, dx, dw = run(x, dy, w, SIZES)
    close(y, np.concatenate([part @ w[e] for e, part in enumerate(parts(x))]))
    close(dx, np.concatenate([part @ w[e].T for e, part in enumerate(parts(dy))]))
    close(dw, np.stack([left.T @ right for left, right in zip(parts(x), parts(dy), strict=True)]))


@pytest.mark.parametrize(("block_rows", "at_once"), [(4, 1), (64, 1), (3, 2), (1, 64)])
def test_packed_rows_in_pieces(block_rows, at_once):
    """Pieces of several devices, each with spare rows of zeros at its end, one of them empty."""
    sizes = np.stack([SIZES, np.roll(SIZES, 2), 0 * SIZES])
    length = sum(SIZES) + 3
    own = [
        draw(sum(SIZES), WIDTH, seed=i) if piece.any() else np.zeros((0, WIDTH), np.float32)
        for i, piece in enumerate(sizes)
    ]
    x = np.concatenate([np.pad(rows, ((0, length - len(rows)), (0, 0))) for rows in own])
    w, of_row = draw(EXPERTS, WIDTH, OUT), [np.repeat(np.arange(EXPERTS), piece) for piece in sizes]

    @jax.jit
    def run(x, dy, w, sizes):
        x = Ragged(x, sizes)
        blocks = blocks_of(x, block_rows=block_rows, at_once=at_once)
        y = experts_products.slot_product(x, w, blocks)
        return y.rows, experts_products.slot_weight_gradient(x, x.with_rows(dy), blocks)

    dy = draw(len(x), OUT, seed=9)
    y, dw = run(x, dy, w, sizes.astype(np.int32))
    wanted, gradient = np.zeros((len(x), OUT), np.float32), np.zeros((EXPERTS, WIDTH, OUT), np.float32)
    for i, experts_of in enumerate(of_row):
        for row, e in enumerate(experts_of, i * length):
            wanted[row] = x[row] @ w[e]
            gradient[e] += np.outer(x[row], dy[row])
    close(y, wanted)
    close(dw, gradient)


@pytest.mark.parametrize(("capacity", "at_once"), [(8, 1), (7, 1), (8, 3), (7, 2)])
def test_slots_that_are_left_out_are_zeros_of_the_product(capacity, at_once):
    slots, w, dy = draw(EXPERTS, capacity, WIDTH), draw(EXPERTS, WIDTH, OUT), draw(EXPERTS, capacity, OUT)
    filled = np.array([[0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0], [1] * 8, [0, 0, 0, 0, 0, 0, 1, 0], [1] * 8])
    slots *= filled[:, :capacity, None]

    @jax.jit
    def run(slots, w, dy):
        blocks = blocks_of(slots, block_rows=4, at_once=at_once)
        y = experts_products.slot_product(slots, w, blocks)
        return blocks.num, y, experts_products.slot_weight_gradient(slots, dy, blocks)

    num, y, dw = run(slots, w, dy)
    assert num.tolist() == [0, 2, 2, 1, 2]
    close(y, np.einsum("ecd,edf->ecf", slots, w))
    close(dw, np.einsum("ecd,ecf->edf", slots, dy))


# -- packed tokens ------------------------------------------------------------------------------------------


def test_packed_tokens_come_back_as_those_in_slots():
    tokens, chosen_of = 12, 2
    x, gates, dy = draw(1, tokens, WIDTH), draw(1, tokens, chosen_of), draw(1, tokens, WIDTH, seed=4)
    numbers = np.argsort(draw(1, tokens, EXPERTS), -1)[..., :chosen_of].astype(np.int32)

    @jax.jit
    def run(x, gates, dy):
        chosen = experts.assign_slots(numbers, num_experts=EXPERTS, capacity=tokens)

        def both_ways(like):
            weights, slots = experts.dispatch_gates(gates, chosen, like), experts.dispatch(x, chosen, like)
            dslots = experts.dispatch(dy, chosen, like)
            return slots, (
                *(experts.combine(s, chosen) for s in (slots, dslots)),
                experts.gates_backward(weights, chosen),
            )

        packed, without = both_ways(experts.packing_of(chosen, num_experts=EXPERTS))
        return packed, both_ways(jnp.zeros((EXPERTS, tokens), jnp.float32))[1], without

    packed, padded, without = run(x, gates, dy)
    assert packed.rows.shape == (tokens * chosen_of, WIDTH)
    assert packed.sizes.tolist() == [np.bincount(numbers.ravel(), minlength=EXPERTS).tolist()]
    in_order = [token for e in range(EXPERTS) for token in range(tokens) if e in numbers[0, token]]
    assert np.array_equal(packed.rows, x[0, in_order])
    for one, other in zip(without, padded, strict=True):
        close(one, np.asarray(other))


def step(text, *inputs):
    return Step(op="einsum", inputs=tuple(parse_array(a) for a in inputs), result=parse_array(text))


PRODUCTS = {
    "forward": step("ge[E,C,Fe]", "xe[E,C,D]", "w[E,D,Fe]"),
    "cotangent": step("dxe[E,C,D]", "dge[E,C,Fe]", "w[E,D,Fe]"),
    "gradient": step("dw[E,D,Fe]", "xe[E,C,D]", "dge[E,C,Fe]"),
    "gradient, the other way round": step("dw[E,D,Fe]", "dge[E,C,Fe]", "xe[E,C,D]"),
}
BLOCKS = {"D": WIDTH, "Fe": OUT, "E": EXPERTS, "C": max(SIZES)}


@pytest.fixture(params=["cpu", "cuda"])
def aware(request, monkeypatch):
    """Kinds that take packed tokens, and blocks even of few slots; blocks one by one or several gathered."""
    monkeypatch.setattr(experts_products, "FEW_SLOTS", 0)
    monkeypatch.setattr(experts_products, "default_platform", lambda: request.param)
    return {**local_steps(), "gelu": over_slots(lambda context, step, x: jnp.tanh(x))}


def context(options=PLAIN):
    return Context(model=MODEL, derived=None, mesh={}, options=options)


def packed(padded):
    return Ragged(
        jnp.asarray(np.concatenate([p[:n] for p, n in zip(padded, SIZES, strict=True)])), jnp.asarray(SIZES)[None]
    )


@pytest.mark.parametrize("product", PRODUCTS)
def test_steps_give_the_same_with_slots_and_with_packed_tokens(product, aware):
    product_step = PRODUCTS[product]
    filled = np.arange(BLOCKS["C"])[None] < SIZES[:, None]
    values = [draw(*(BLOCKS[dim] for dim in array.dims)) for array in product_step.inputs]
    values = [v * filled[..., None] if "C" in a.dims else v for v, a in zip(values, product_step.inputs, strict=True)]
    wanted = contract_step(product_step, *values)
    close(jax.jit(lambda *v: aware["einsum"](context(), product_step, *v))(*values), np.asarray(wanted))
    of_packed = [packed(v) if "C" in a.dims else v for v, a in zip(values, product_step.inputs, strict=True)]
    found = jax.jit(lambda *v: aware["einsum"](context(), product_step, *v))(*of_packed)
    if "C" in product_step.result.dims:
        found, wanted = found.rows, packed(np.asarray(wanted)).rows
    close(found, np.asarray(wanted))


def test_biases_and_activations_of_packed_tokens(aware):
    rows, bias = packed(draw(EXPERTS, max(SIZES), WIDTH)), jnp.asarray(draw(EXPERTS, WIDTH))
    repeated, of_slots = np.repeat(bias, SIZES, axis=0), PRODUCTS["forward"]
    close(aware["bias_add"](context(), of_slots, rows, bias).rows, np.asarray(rows.rows) + repeated)
    sums = np.stack([p.sum(0) for p in parts(np.asarray(rows.rows))])
    close(aware["bias_add_backward"](context(), of_slots, rows), sums)
    close(aware["gelu"](context(), PRODUCTS["forward"], rows).rows, np.tanh(rows.rows))
    close((rows + rows).rows, 2 * np.asarray(rows.rows))


def test_a_bound_on_slots_keeps_the_batched_product(aware):
    values = [draw(EXPERTS, 4, WIDTH), draw(EXPERTS, WIDTH, OUT)]
    for options, loops in ((PLAIN, True), (ProgramOptions(capacity_factor=1.25), False)):
        run = jax.jit(lambda *v, options=options: aware["einsum"](context(options), PRODUCTS["forward"], *v))
        assert ("while" in run.lower(*values).as_text()) == loops
