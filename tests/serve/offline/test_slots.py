"""Prefill, insert and generate: tokens as of the sampler without a cache, in any slot, begun at any time."""

import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.serve.offline.slots import SlotEngine
from tests.parallel.generate_cases import FAMILIES, LLAMA, float_params, likeliest, step_of

PROMPTS = [[5, 9, 60, 2, 7, 7, 1, 8, 30], [11, 12, 13]]


@pytest.mark.parametrize(
    ("model", "axes"), [("llama", {"tensor": 2}), pytest.param("deepseek_v2", {}, marks=pytest.mark.slow)]
)
def test_sequences_begin_and_end_in_slots(model, axes):
    model, params = FAMILIES[model], float_params(FAMILIES[model])
    wanted = [likeliest(model, params, prompt, 7) for prompt in PROMPTS]
    step = step_of(model, axes)
    engine, placed = SlotEngine(step), step.place(params)
    state = engine.insert(engine.prefill(placed, PROMPTS[0]), engine.init_decode_state(), 2)
    first = [int(state.tokens[2])]
    for _ in range(2):
        state, _ = engine.generate(placed, state)
        first.append(int(state.tokens[2]))
    state = engine.insert(engine.prefill(placed, PROMPTS[1]), state, 0)
    second = [int(state.tokens[0])]
    for _ in range(4):
        state, logits = engine.generate(placed, state)
        first.append(int(state.tokens[2]))
        second.append(int(state.tokens[0]))
    assert [first, second] == [wanted[0], wanted[1][:5]]
    assert np.argmax(logits[2]) == first[-1]
    assert state.lengths.tolist() == [7, 0, 15, 0]
    # a slot is free again
    state = engine.insert(engine.prefill(placed, PROMPTS[1]), state, 2)
    state, _ = engine.generate(placed, state)
    assert int(state.tokens[2]) == wanted[1][1]


def test_what_has_no_slot_is_refused():
    step = step_of(LLAMA, {})
    engine = SlotEngine(step)
    with pytest.raises(InputError, match=r"a prompt has 24 tokens. Give 1 to 23"):
        engine.prefill({}, range(24))
    with pytest.raises(InputError, match=r"a prompt has tokens 3 to 64. Give 0 to 63"):
        engine.prefill({}, [3, 64])
    state = engine.init_decode_state()
    for slot in (-1, 4):
        with pytest.raises(InputError, match=f"there is no slot {slot}. Give 0 to 3"):
            engine.insert(None, state, slot)
    state.lengths[1] = 24
    with pytest.raises(InputError, match="a slot has used all its 24 positions"):
        engine.generate({}, state)
    with pytest.raises(CannotRunError, match="slots support only unsharded sequences"):
        SlotEngine(step_of(LLAMA, {"data": 2}))
    with pytest.raises(InputError, match="4 slots have 6 pages each"):
        SlotEngine(step_of(LLAMA, {}, num_pages=8))
