"""The engine: tokens of the forward pass whatever else is in the batch, slots and pages whole in the end."""

import time

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from msgspec import structs

from meshwright.algebra.generation.cache import pages_of_windows
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.ops import past_latent_attention
from meshwright.batching.limits import POLICIES, SchedulerLimits
from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.parallel.mesh import device_mesh
from meshwright.serve.drawing.drawer import OutputRow, TokenDrawer
from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.engine import Engine
from meshwright.serve.group import EngineGroup
from meshwright.serve.request import TokenRequest
from meshwright.serve.sequences.step_shapes import StepShapes
from meshwright.spec.strategy import Strategy, make_mesh
from tests.logits import logits_fn
from tests.parallel.generate_cases import FAMILIES, LLAMA, float_params, likeliest, with_groups

MAX_LEN, PAGE_LEN, NUM_PAGES = 32, 4, 24
PROMPTS = [[5, 9, 60, 2, 7, 7, 1, 8, 30], [3], [11, 12, 13], list(range(20, 37)), [40, 2], [9] * 6]
NUM_TOKENS = 9


@pytest.fixture(scope="module")
def params():
    return float_params(LLAMA)


def step_of(model=LLAMA, *, batch_invariant=False, axes=None, **stored) -> PackedStep:
    storage = Storage(cache_dtype="fp32", page_len=PAGE_LEN, num_pages=NUM_PAGES, **stored)
    strategy = Strategy(mesh=make_mesh(axes or {}), state="fp32")
    return PackedStep(model, strategy, max_len=MAX_LEN, max_seqs=4, storage=storage, batch_invariant=batch_invariant)


def engine_on(step, placed, **options) -> Engine:
    given = {"max_requests": 4, "token_budget": 16, "page_len": PAGE_LEN, "num_pages": NUM_PAGES, **options}
    return Engine(step, placed, SchedulerLimits(**given))


@pytest.fixture(scope="module")
def step():
    return step_of()


@pytest.fixture(scope="module")
def engine_of(step, params):
    """Engines on two steps, whose programs are compiled once."""
    placed, invariant = step.place(params), step_of(batch_invariant=True)

    def make(batch_invariant=False, **options) -> Engine:
        engine = engine_on(invariant if batch_invariant else step, placed, **options)
        if batch_invariant:
            engine.warm_up()
        return engine

    return make


@pytest.fixture(scope="module")
def expected(params):
    return [likeliest(LLAMA, params, prompt, NUM_TOKENS) for prompt in PROMPTS]


def request(prompt, **options) -> TokenRequest:
    return TokenRequest(prompt=tuple(prompt), **{"max_tokens": NUM_TOKENS, **options})


def tokens_of(outputs) -> list[int]:
    return [one.token for one in outputs if one.token is not None]


def assert_whole(engine: Engine) -> None:
    state = engine.state()
    assert (state.running, state.waiting, state.pages_used) == (0, 0, 0)
    assert not engine.has_work
    pools = [owner.pages for owner in engine._owners]
    idle = [node.page for pool in pools for node in pool._idle_nodes]
    assert sorted([*idle, *(page for pool in pools for page in pool.free)]) == list(range(NUM_PAGES))
    assert all((pool.num_free, pool._sharers) == (len(pool.free), {}) for pool in pools)
    assert sorted(slot for owner in engine._owners for slot in owner.free_slots) == list(range(4))


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_those_of_the_forward_pass(engine_of, expected, policy):
    """17 tokens of a prompt take two chunks; six requests share four slots."""
    engine = engine_of(policy=policy)
    found = engine.run([request(prompt) for prompt in PROMPTS])
    assert [tokens_of(outputs) for outputs in found] == expected
    assert [outputs[-1].finish for outputs in found] == ["length"] * len(PROMPTS)
    assert_whole(engine)


def test_heads_over_devices_give_the_same_tokens(params, expected):
    step = step_of(axes={"tensor": 4})
    engine = engine_on(step, step.place(params), prefix_cache=True)
    bias = Sampling(logit_bias=((0, -1.0),))
    requests = [*map(request, PROMPTS), request(PROMPTS[0], sampling=bias, logprobs=1)]
    found = [tokens_of(outputs) for outputs in engine.run(requests)]
    assert found[:-1] == expected
    assert len(found[-1]) == NUM_TOKENS
    assert_whole(engine)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_greedy_tokens_of_quantised_weights_are_those_of_one_device(weights):
    model = with_groups(LLAMA)
    params, found = float_params(model), []
    for axes in ({}, {"tensor": 2}):
        step = step_of(model, axes=axes, weights=weights)
        outputs = engine_on(step, step.place(params)).run([request(prompt) for prompt in PROMPTS[:4]])
        found.append(list(map(tokens_of, outputs)))
    assert found[0] == found[1]


def test_parts_of_prompts_meet_the_latents_before_them(monkeypatch):
    """In chunks of 32 rows, of which some have something before them, and a token of a sequence beside them."""
    monkeypatch.setattr(past_latent_attention, "CHUNK_BYTES", 1)
    model = FAMILIES["deepseek_v2"]
    params, step = float_params(model), step_of(model)
    engine = engine_on(step, step.place(params), token_budget=48, prefix_cache=False)
    prompts = [np.random.default_rng(number).integers(0, 64, 26).tolist() for number in range(3)]
    found = engine.run([request(prompt, max_tokens=3) for prompt in prompts])
    assert list(map(tokens_of, found)) == [likeliest(model, params, prompt, 3) for prompt in prompts]
    assert max(shape.rows for shape in step._compiled) == 48


def test_a_preempted_request_goes_on_where_it_was(engine_of, expected):
    """Six pages are few for four requests of up to 26 positions."""
    engine = engine_of(watermark=0.0)
    taken = [engine._owners[0].pages.free.pop() for _ in range(16)]
    engine._owners[0].pages.take(16)
    found = engine.run([request(prompt) for prompt in PROMPTS])
    assert engine.state().preemptions > 0
    assert [tokens_of(outputs) for outputs in found] == expected
    engine._owners[0].pages.free += taken
    engine._owners[0].pages.give(16)
    assert_whole(engine)


def test_a_preempted_request_finds_what_it_had_written(engine_of):
    """Full pages of its prompt and its answer stay while nobody needs them; only what is behind is computed again."""
    asked = [request([1 + number, *range(7 + number, 15 + number)], max_tokens=20) for number in range(4)]
    wanted, prefilled = [tokens_of(engine_of().run([one])[0]) for one in asked], {}
    for prefix_cache in (False, True):
        engine = engine_of(watermark=0.0, prefix_cache=prefix_cache)
        engine._owners[0].pages.take(12)
        del engine._owners[0].pages.free[-12:]
        assert list(map(tokens_of, engine.run(asked))) == wanted
        assert engine.state().preemptions == 3
        prefilled[prefix_cache] = sum(sums.prefilled for sums in engine.state().sums.values())
    assert prefilled[True] <= 4 * 9 + 3 * (2 * PAGE_LEN + 3) < prefilled[False]


def test_a_stop_token_ends_a_request_before_it(engine_of, expected):
    stop = expected[0][4]
    first = expected[0].index(stop)
    engine = engine_of()
    one, other = engine.run([request(PROMPTS[0], stop_tokens=frozenset([stop])), request(PROMPTS[1])])
    assert tokens_of(one) == expected[0][:first]
    assert (one[-1].finish, one[-1].token) == ("stop", None)
    assert tokens_of(other) == expected[1]
    assert_whole(engine)


def test_no_stop_token_is_drawn_before_the_fewest_tokens(engine_of, expected):
    stop = frozenset([expected[0][0]])
    (found,) = engine_of().run([request(PROMPTS[0], stop_tokens=stop, min_tokens=5)])
    tokens = tokens_of(found)
    assert len(tokens) >= 5
    assert not stop & set(tokens[:5])


def test_a_cancelled_request_is_gone_at_once(engine_of, expected):
    engine = engine_of()
    numbers = [engine.submit(request(prompt)) for prompt in PROMPTS]
    found = {number: [] for number in numbers}
    for count in range(40):
        if count == 3:
            engine.cancel(numbers[0])
            engine.cancel(numbers[5])  # it waits
            engine.cancel(numbers[0])
        for output in engine.step():
            assert count < 3 or output.number not in (numbers[0], numbers[5])
            found[output.number].append(output)
    assert not tokens_of(found[numbers[5]])
    assert [tokens_of(found[n]) for n in numbers[1:5]] == expected[1:5]
    assert_whole(engine)


def test_samples_do_not_depend_on_company(engine_of):
    sampling = [Sampling(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=n) for n in range(len(PROMPTS))]
    requests = [request(prompt, sampling=one) for prompt, one in zip(PROMPTS, sampling, strict=True)]
    together = [tokens_of(outputs) for outputs in engine_of().run(requests)]
    alone = [tokens_of(engine_of(token_budget=4).run([one])[0]) for one in requests]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def logits_after(params, tokens) -> np.ndarray:
    return np.asarray(jax.jit(logits_fn(LLAMA))(params, np.array([tokens], np.int32)))[0]


def test_log_probabilities_are_those_of_the_forward_pass(engine_of, params):
    (outputs, plain) = engine_of().run([request(PROMPTS[3], logprobs=3, echo=True), request(PROMPTS[0])])
    tokens = PROMPTS[3] + tokens_of(outputs)
    every = np.asarray(jax.nn.log_softmax(logits_after(params, tokens)))
    found = [*outputs[0].prompt, *(one.logprob for one in outputs)]
    assert [one.token for one in found] == tokens[1:]
    for place, one in enumerate(found):
        assert one.logprob == pytest.approx(every[place, one.token], abs=1e-4)
        assert [token for token, _ in one.top] == np.argsort(-every[place], kind="stable")[:3].tolist()
    assert all(one.logprob is None and not one.prompt for one in plain)


def test_a_prompt_is_scored_without_a_token(engine_of, params):
    (outputs,) = engine_of().run([request(PROMPTS[0], logprobs=0, echo=True, max_tokens=0)])
    assert [(one.token, one.finish) for one in outputs] == [(None, "length")]
    every = np.asarray(jax.nn.log_softmax(logits_after(params, PROMPTS[0])))
    wanted = [every[place, token] for place, token in enumerate(PROMPTS[0][1:])]
    assert [one.logprob for one in outputs[0].prompt] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        pytest.param({"presence_penalty": 1.5, "frequency_penalty": 0.5}, marks=pytest.mark.slow),
        pytest.param({"logit_bias": ((7, 3.0), (9, -100.0))}, marks=pytest.mark.slow),
    ],
)
def test_penalties_change_logits_as_their_rules_say(engine_of, params, options):
    sampling = Sampling(**options)
    (outputs, _) = engine_of().run([request(PROMPTS[0], sampling=sampling), request(PROMPTS[3])])
    tokens = list(PROMPTS[0])
    for _ in range(NUM_TOKENS):
        logits = logits_after(params, tokens)[-1].astype(np.float64)
        output = tokens[len(PROMPTS[0]) :]
        for token, bias in sampling.logit_bias:
            logits[token] += bias
        for token in set(tokens):
            logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
        for token in set(output):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
        tokens.append(int(logits.argmax()))
    assert tokens_of(outputs) == tokens[len(PROMPTS[0]) :]


def test_what_can_never_run_is_refused(engine_of):
    engine = engine_of()
    for wrong, words in (
        (request([1] * 30), "need 39 positions; this engine has 32"),
        (request([LLAMA.vocab_size]), "outside of V"),
        (request([1], stop_tokens=frozenset([9999])), "token 9999 is outside"),
    ):
        with pytest.raises(InputError, match=words):
            engine.submit(wrong)
    assert_whole(engine)
    with pytest.raises(InputError, match="differ from the step's"):
        engine_of(num_pages=7)


def test_nothing_compiles_after_the_warm_up(step, engine_of):
    engine = engine_of()
    engine.warm_up()
    before = set(step._compiled)
    drawn = set(engine._drawer._compiled)
    engine.run([request(prompt, sampling=Sampling(temperature=1.0)) for prompt in PROMPTS])
    engine.run([request(prompt, echo=True, logprobs=1) for prompt in PROMPTS])
    assert set(step._compiled) == before
    assert set(engine._drawer._compiled) == drawn


def test_stop_tokens_are_not_those_of_the_request_before(engine_of, expected):
    """Of requests in one slot the second may have the first one's stop token as its first token."""
    engine = engine_of(max_requests=4)
    stop = frozenset(expected[0][:1])
    engine.run([request(PROMPTS[0], min_tokens=3, stop_tokens=stop, max_tokens=4)])
    (outputs,) = engine.run([request(PROMPTS[0], min_tokens=5, logprobs=1)])
    assert tokens_of(outputs) == expected[0]


def test_an_engine_answers_with_its_first_two_shapes(step, params, expected, monkeypatch):
    """A step without a program of its own takes a larger one that is there, and its own once that is compiled; what is
    in files is not counted with those that are compiled."""
    alone = step_of()
    engine = engine_on(alone, alone.place(params))
    engine.warm_up(first_only=True)
    chunk, decode = sorted(alone._compiled, key=lambda shape: shape.longest, reverse=True)
    assert (chunk.rows, decode.rows, decode.longest) == (16, 4, 1)
    assert [tokens_of(outputs) for outputs in engine.run(list(map(request, PROMPTS)))] == expected
    assert len(alone._compiled) == 2
    kept, told = {alone.program_name(shape) for shape in alone._compiled}, []
    monkeypatch.setattr(alone.programs, "has", lambda names: set(names) <= kept)
    engine.warm_up(lambda *counts: told.append(counts))
    num_new = len(engine.shapes()) - 2
    assert told == [(0, num_new)] * 2 + [(num_done, num_new) for num_done in range(num_new + 1)]
    assert set(alone._compiled) == set(engine.shapes())
    (outputs,) = engine.run([request(PROMPTS[1])])
    assert tokens_of(outputs) == expected[1]
    assert ("decode", 1) in engine.state().sums
    assert all(rows == 4 for kind, rows in list(engine.state().sums)[:2] if kind == "decode")


def test_shapes_of_a_step_are_the_smallest_that_are_ready(step):
    limits = {"max_requests": 4, "page_len": PAGE_LEN, "num_pages": NUM_PAGES}
    shapes = StepShapes(step, SchedulerLimits(token_budget=32, **limits))
    assert [(one.rows, one.outputs) for one in shapes.chunks] == [(16, 4), (16, 16), (32, 4), (32, 32)]
    assert shapes.fitting(3, 3, alone=True) == (4, 4, 4, 1)
    assert shapes.fitting(3, 3, alone=False) == (16, 4, 4, 16)
    shapes.ready |= set(shapes.first())
    assert shapes.first() == [(32, 4, 4, 32), (4, 4, 4, 1)]
    assert shapes.fitting(1, 1, alone=True) == (4, 4, 4, 1)
    assert shapes.fitting(3, 3, alone=False) == (32, 4, 4, 32)
    assert shapes.fitting(3, 9, alone=False) == (16, 4, 16, 16)  # no shape with so many logits is ready
    shapes.ready.add(shapes.chunks[0])
    assert shapes.fitting(3, 3, alone=False) == (16, 4, 4, 16)


def test_prompts_that_begin_alike_share_pages(engine_of, params):
    """A page has 4 positions; of a prompt that is known whole, the last page is computed again."""
    engine, long = engine_of(prefix_cache=True), PROMPTS[3]
    prompts = [long, [*long[:9], 1, 2, 3], long[:8], [7, *long[1:]]]
    wanted = [likeliest(LLAMA, params, prompt, NUM_TOKENS) for prompt in prompts]
    hits = []
    for prompt, tokens in zip(prompts, wanted, strict=True):
        (outputs,) = engine.run([request(prompt)])
        assert tokens_of(outputs) == tokens
        hits.append(outputs[0].cached)
    assert hits == [0, 8, 4, 0]
    assert engine.state().prefix_hits == 12
    assert_whole(engine)
    found = engine.run([request(prompt) for prompt in prompts])
    assert [tokens_of(outputs) for outputs in found] == wanted
    assert [outputs[0].cached for outputs in found] == [16, 8, 4, 16]
    assert_whole(engine)


def test_engines_on_devices_of_their_own_are_one(step, engine_of, params, expected):
    other = step.on(device_mesh(step.strategy.mesh, jax.devices()[1:2]))
    group = EngineGroup([engine_of(prefix_cache=True), engine_on(other, other.place(params), prefix_cache=True)])
    assert {array.device for array in jax.tree.leaves(group.engines[1]._cache)} == {jax.devices()[1]}
    found = group.run([request(prompt) for prompt in PROMPTS])
    assert [tokens_of(outputs) for outputs in found] == expected
    assert [{one.number for one in outputs} for outputs in found] == [{n} for n in range(len(PROMPTS))]
    assert all(engine.state().steps for engine in group.engines)
    # the engine that has the beginning of a prompt gets it, though the other one is first
    assert sorted(engine.order(request(PROMPTS[3]))[1] for engine in group.engines) == [-4, 0]
    (outputs,) = group.run([request(PROMPTS[3])])
    assert outputs[0].cached == 16
    number = group.submit(request(PROMPTS[0]))
    group.cancel(number)
    assert not group.has_work
    assert group.state().prefix_hits == sum(engine.state().prefix_hits for engine in group.engines) == 16
    for engine in group.engines:
        assert_whole(engine)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"expert": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}])
def test_tokens_do_not_depend_on_what_is_split(axes):
    model = FAMILIES["mixtral"]
    params, step = float_params(model), step_of(model, axes=axes)
    engine = engine_on(step, step.place(params), prefix_cache=True)
    assert all(shape.rows % step.row_parts(shape.longest) == 0 for shape in engine.shapes())
    wanted = [likeliest(model, params, prompt, NUM_TOKENS) for prompt in PROMPTS]
    for hits in (0, 28):
        found = engine.run([request(prompt, logprobs=0) for prompt in PROMPTS])
        assert [tokens_of(outputs) for outputs in found] == wanted
        assert engine.state().prefix_hits == hits
    assert_whole(engine)


@pytest.mark.parametrize("rule", ["prefix_lm", "transfusion"])
def test_prompts_whose_positions_see_later_ones_are_whole(rule):
    """The prefix is the prompt; there are no images. Preempted requests keep their prefix."""
    model = structs.replace(LLAMA, attention_mask=rule, attention_score="alibi")
    params, step = float_params(model), step_of(model)
    engine = engine_on(step, step.place(params), policy="interleaved")
    logits = jax.jit(logits_fn(model))
    for prompt, outputs in zip(PROMPTS, engine.run([request(prompt) for prompt in PROMPTS]), strict=True):
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            padded = np.array([tokens + [0] * (MAX_LEN - len(tokens))], np.int32)
            data = {"prefix": np.array([len(prompt)], np.int32)} if rule == "prefix_lm" else {"spans": 0 * padded}
            tokens.append(int(np.argmax(logits(params, padded, **data)[0, len(tokens) - 1])))
        assert tokens_of(outputs) == tokens[len(prompt) :]
    assert_whole(engine)
    with pytest.raises(InputError, match=r"positions of a prompt see later ones\. Give limits with the policy inter"):
        engine_on(step, {})
    with pytest.raises(CannotRunError, match="attention_mask='tree' reads enter of each sequence, which no request"):
        engine_on(step_of(structs.replace(LLAMA, attention_mask="tree")), {}, policy="interleaved")


def test_pages_of_idle_prefixes_make_room(engine_of, params):
    engine = engine_of(prefix_cache=True)
    for first in range(12):
        prompt = [first, *range(20, 36)]
        (outputs,) = engine.run([request(prompt, max_tokens=2)])
        assert tokens_of(outputs) == likeliest(LLAMA, params, prompt, 2)
        assert_whole(engine)
    assert engine.state().prefix_hits == 0


def pages_of(engine: Engine, tokens) -> list[bytes]:
    """The bytes in the cache of the pages that the tree has of a prompt, all layers of keys and values."""
    found, node = [], engine._owners[0].pages.roots[-1]
    for start in range(0, len(tokens) - PAGE_LEN + 1, PAGE_LEN):
        node = node.children[tuple(tokens[start : start + PAGE_LEN])]
        assert node.page >= 0
        found.append(b"".join(np.asarray(layer[node.page]).tobytes() for layer in jax.tree.leaves(engine._cache)))
    return found


@pytest.mark.parametrize("axes", [{}, {"tensor": 4}])
def test_a_page_from_the_host_is_the_computed_one_bit_for_bit(step, params, axes):
    step = step_of(axes=axes) if axes else step
    limits = SchedulerLimits(max_requests=4, token_budget=16, page_len=PAGE_LEN, num_pages=NUM_PAGES, prefix_cache=True)
    page_bytes = sum(array.nbytes for array in jax.tree.leaves(step.init_cache())) // NUM_PAGES
    engine = Engine(step, step.place(params), limits, host_cache_bytes=8.5 * page_bytes)
    long = PROMPTS[3]

    def run(tokens):
        (outputs,) = engine.run([request(tokens, logprobs=2, max_tokens=3)])  # an answer fills no page
        return [outputs[0].cached, [(one.token, one.logprob) for one in outputs]]

    assert run(long)[0] == 0
    computed, from_device = pages_of(engine, long), run(long)
    for number in range(6):
        run([number, *range(20, 36)])
        assert_whole(engine)
    assert all(node.copy is not None for node in engine._owners[0].pages._on_host)
    assert len(engine._owners[0].pages._on_host) == 5  # four of the long prompt, which was idle longest
    assert run(long) == from_device
    assert engine.state().host_hits == from_device[0] == 16
    assert pages_of(engine, long) == computed
    for number in range(9):
        run([number, *range(30, 46)])
        copies = [node.copy for node in engine._owners[0].pages._on_host if node.copy is not None]
        assert sum(array.nbytes for copy in copies for array in copy) <= 8 * page_bytes
    assert run(long)[0] == 0  # there was room for eight pages
    assert engine.state().host_hits == 16
    assert_whole(engine)


def test_a_host_without_room_for_a_page_is_refused(step):
    limits = SchedulerLimits(max_requests=4, token_budget=16, page_len=PAGE_LEN, num_pages=NUM_PAGES)
    for few, prefix_cache in ((1, True), (10**9, False)):
        with pytest.raises(InputError, match=r"pages of shared prompts, [\d,]+ bytes each. Give room for one at least"):
            Engine(step, {}, structs.replace(limits, prefix_cache=prefix_cache), host_cache_bytes=few)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_needle_is_the_same_bit_by_bit_in_any_batch(engine_of, data):
    """Any company, order, budget, cancellation, prefix hit, preemption: the same log-probabilities to the last bit."""
    needle = request(PROMPTS[3], logprobs=2)
    wanted = [one.logprob for one in engine_of(batch_invariant=True).run([needle])[0]]
    budget = data.draw(st.sampled_from([4, 5, 16, 31]))
    engine = engine_of(batch_invariant=True, watermark=0.0, prefix_cache=data.draw(st.booleans()), token_budget=budget)
    few = data.draw(st.sampled_from([0, 12, 16]))
    taken = [engine._owners[0].pages.free.pop() for _ in range(few)]
    engine._owners[0].pages.take(few)
    others, found = [], {}
    for _ in range(data.draw(st.integers(1, 5))):
        prompts = data.draw(st.lists(st.sampled_from([*PROMPTS, PROMPTS[3][:12]]), max_size=5))
        others += [engine.submit(request(p, max_tokens=data.draw(st.integers(1, NUM_TOKENS)))) for p in prompts]
        found[engine.submit(needle)] = []
        for _ in range(data.draw(st.integers(0, 8))):
            for output in engine.step():
                found.get(output.number, []).append(output)
        if others and data.draw(st.booleans()):
            engine.cancel(data.draw(st.sampled_from(others)))
    while engine.has_work:
        for output in engine.step():
            found.get(output.number, []).append(output)
    for outputs in found.values():
        assert [one.logprob for one in outputs] == wanted
    engine._owners[0].pages.free += taken
    engine._owners[0].pages.give(few)
    assert_whole(engine)


@pytest.mark.slow
def test_products_that_xla_splits_by_the_number_of_rows_keep_their_bits():
    """On x86-64 products of 240 or 448 inputs sum otherwise in 2 to 16 rows than in 32."""
    model = structs.replace(LLAMA, d_model=240, d_ff=448, vocab_size=331)
    step = step_of(model, batch_invariant=True)
    engine = engine_on(step, step.place(float_params(model)), prefix_cache=True)
    engine.warm_up()
    assert engine._shapes.decode[-1].rows == 32
    assert (engine.state().steps, engine.state().sums, engine.submit(request([1]))) == (0, {}, 0)
    engine.cancel(0)
    asked = [request(prompt, logprobs=2, echo=number % 2 == 0) for number, prompt in enumerate(PROMPTS)]

    def bits(found):
        return [(one.logprob, one.prompt) for one in found]

    alone = [bits(engine.run([one])[0]) for one in asked]
    assert [bits(engine.run([one])[0]) for one in asked] == alone
    assert list(map(bits, engine.run(asked))) == alone
    assert list(map(bits, engine.run(asked[::-1])))[::-1] == alone


@pytest.mark.parametrize("vocab_size", [400, 1024])
def test_log_probabilities_of_many_tokens_are_the_same_bits_in_any_number_of_rows(vocab_size):
    """The order of XLA's reductions changes with the number of results; a vocabulary of 64 does not show it."""
    logits = np.random.default_rng(0).normal(size=(32, vocab_size)).astype(np.float32) * 3
    found = []
    for size in (2, 3, 8, 12, 32):
        drawer = TokenDrawer(32, vocab_size, SingleDeviceSharding(jax.devices()[0]), ProgramStore(None, None))
        for slot in range(size):
            drawer.enter(slot, request([1], sampling=Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=slot)), [])
        drawn = drawer.draw(jax.numpy.asarray(logits[:size]), [OutputRow(s, 0) for s in range(size)], adjusted=True)
        found.append([np.asarray(each)[:2].tolist() for each in drawn])
    assert found[1:] == found[:1] * 4


def test_a_prompt_is_scored_once_whatever_is_preempted(engine_of):
    """Chunks of 4 tokens; three prompts of 17 need more than the eight pages that are left."""
    requests = [request([1 + number, *PROMPTS[3]], echo=True, logprobs=0, max_tokens=9) for number in range(4)]
    alone = [engine_of().run([one])[0] for one in requests]
    engine = engine_of(watermark=0.0, token_budget=4)
    taken = [engine._owners[0].pages.free.pop() for _ in range(14)]
    engine._owners[0].pages.take(14)
    found = engine.run(requests)
    assert engine.state().preemptions > 0
    for outputs, expected in zip(found, alone, strict=True):
        assert tokens_of(outputs) == tokens_of(expected)
        scored = [one for output in outputs for one in output.prompt]
        assert [one.token for one in scored] == [one.token for one in expected[0].prompt]
    engine._owners[0].pages.free += taken
    engine._owners[0].pages.give(14)
    assert_whole(engine)


def test_an_answer_is_known_when_the_chat_goes_on(engine_of, params, expected):
    """Of 17 tokens and 9 more all but the last are computed: six pages of four."""
    engine = engine_of(prefix_cache=True)
    engine.run([request(PROMPTS[3])])
    prompt = [*PROMPTS[3], *expected[3], 1, 2]
    (found,) = engine.run([request(prompt, max_tokens=4)])
    assert (found[0].cached, tokens_of(found)) == (24, likeliest(LLAMA, params, prompt, 4))
    assert_whole(engine)


@pytest.mark.parametrize("name", ["gemma2", "llama4", pytest.param("mistral", marks=pytest.mark.slow)])
def test_pages_behind_a_window_are_used_again(name):
    """Windows and chunks of 6 positions; further requests begin behind pages whose windows are still there."""
    model, prompts = FAMILIES[name], [*PROMPTS, *PROMPTS[::-1]]
    params, pages = float_params(model), pages_of_windows(model.sliding_window, PAGE_LEN, num_seqs=4, num_rows=5)
    assert pages < 4 * max(len(prompt) + NUM_TOKENS for prompt in prompts) // PAGE_LEN
    step = step_of(model, window_pages=pages + 3)
    engine = engine_on(step, step.place(params), token_budget=5, watermark=0.0, prefix_cache=True)
    expected = [likeliest(model, params, prompt, NUM_TOKENS) for prompt in prompts]
    for _ in range(2):
        assert list(map(tokens_of, engine.run([request(prompt) for prompt in prompts]))) == expected
        assert_whole(engine)
        windows = engine._owners[0].pages.windows
        assert sorted([*windows.free, *(page.number for page in windows.idle)]) == list(range(pages + 3))
    assert engine.state().prefix_hits >= 2 * 16


@pytest.mark.parametrize(
    "name", [name if name in ("gemma2", "mixtral") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_is_the_same_bit_by_bit_in_any_batch(name):
    model = FAMILIES[name]
    if model.moe_layers:
        with pytest.raises(CannotRunError, match="has experts"):
            step_of(model, batch_invariant=True)
        return
    step = step_of(model, batch_invariant=True)
    placed, needle = step.place(float_params(model)), request(PROMPTS[3], logprobs=2)
    found = []
    for budget, company in ((16, []), (5, PROMPTS), (16, [*PROMPTS, *PROMPTS]), (31, [PROMPTS[3], PROMPTS[5]])):
        engine = engine_on(step, placed, token_budget=budget, prefix_cache=True)
        outputs = engine.run([*map(request, company), needle, *map(request, company)])[len(company)]
        found.append([one.logprob for one in outputs])
    assert found[1:] == found[:1] * 3


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_calls_leaves_the_pool_whole(engine_of, expected, data):
    """Requests that come, end by tokens, and are cancelled, in any order: the tokens of those that stay are right."""
    policy, shares = data.draw(st.sampled_from(POLICIES)), data.draw(st.booleans())
    engine = engine_of(watermark=0.0, policy=policy, prefix_cache=shares and policy != "static")
    found, whose, gone = {}, {}, set()
    few = 0 if policy == "static" else data.draw(st.sampled_from([0, 12, 16]))
    taken = [engine._owners[0].pages.free.pop() for _ in range(few)]
    engine._owners[0].pages.take(few)
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(st.sampled_from(["submit", "cancel", "step", "step"]))
        if action == "submit":
            index = data.draw(st.integers(0, len(PROMPTS) - 1))
            number = engine.submit(request(PROMPTS[index], max_tokens=data.draw(st.integers(1, NUM_TOKENS))))
            whose[number], found[number] = index, []
        elif action == "cancel" and whose:
            number = data.draw(st.sampled_from(sorted(whose)))
            engine.cancel(number)
            gone.add(number)
        else:
            for output in engine.step():
                found[output.number].append(output)
    while engine.has_work:
        for output in engine.step():
            found[output.number].append(output)
    for number, outputs in found.items():
        tokens = tokens_of(outputs)
        assert tokens == expected[whose[number]][: len(tokens)]
        assert number in gone or outputs[-1].finish == "length"
    engine._owners[0].pages.free += taken
    engine._owners[0].pages.give(few)
    assert_whole(engine)


def test_the_seconds_of_steps_are_those_that_the_engine_ran(engine_of):
    engine = engine_of()
    engine.run([request(prompt) for prompt in PROMPTS])  # programs are compiled
    before = dict(engine.state().sums)
    start_s = time.perf_counter()
    engine.run([request(prompt) for prompt in PROMPTS])
    wall_s, sums = time.perf_counter() - start_s, engine.state().sums
    seconds = sum(one.seconds for one in sums.values()) - sum(one.seconds for one in before.values())
    assert 0.5 * wall_s < seconds <= wall_s
    assert sum(one.steps for one in sums.values()) == engine.state().steps
    assert {rows for _, rows in sums} <= {shape.rows for shape in engine.shapes()}
