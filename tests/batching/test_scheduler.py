import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.request import GenerationRequest
from meshwright.batching.scheduler import Scheduler
from meshwright.core.errors import InputError
from tests.batching.mock import MockEngine, limits, traffic

BOUNDS = SchedulerLimits(max_requests=4, token_budget=8, page_len=4, num_pages=100, watermark=0.0)


def scheduler_of(*lengths, prefix=None, prefix_len=0, **bounds):
    """A scheduler with requests of (prompt, output), all of the same prefix."""
    scheduler = Scheduler(msgspec.structs.replace(BOUNDS, **bounds))
    for number, (prompt, output) in enumerate(lengths):
        scheduler.submit(
            GenerationRequest(number=number, prompt=prompt, output=output, prefix=prefix, prefix_len=prefix_len)
        )
    return scheduler


def numbers(actives):
    return [active.request.number for active in actives]


def run(scheduler, num_steps=None):
    """Commits the next step; returns its (decode, prefill, cached tokens, repeats) and who ended."""
    step = scheduler.plan()
    prefill = {active.request.number: num for active, num in step.prefill}
    _, ended = scheduler.commit(step, num_steps or step.repeats)
    return numbers(step.decode), prefill, step.cached_tokens, step.repeats, numbers(ended)


def test_chunks_fill_the_token_budget_after_decoding():
    scheduler = scheduler_of((5, 4), (10, 2))
    assert run(scheduler) == ([], {0: 5, 1: 3}, 0, 1, [])
    assert run(scheduler) == ([0], {1: 7}, 5, 1, [])
    assert run(scheduler) == ([0, 1], {}, 6 + 10, 1, [1])
    assert run(scheduler) == ([0], {}, 7, 1, [0])
    assert scheduler.plan().repeats == 0


def test_prefill_past_counts_the_pairs_of_causal_attention():
    scheduler = scheduler_of((5, 4), (10, 2))
    first = scheduler.plan()
    assert first.prefill_tokens * (first.prefill_past + 1) == pytest.approx((1 + 2 + 3 + 4 + 5) + (1 + 2 + 3))
    scheduler.commit(first)
    second = scheduler.plan()
    assert second.prefill_tokens * (second.prefill_past + 1) == pytest.approx(sum(range(4, 11)))


def test_interleaved_prefills_whole_prompts_while_nothing_decodes():
    scheduler = scheduler_of((5, 3), (3, 2), (20, 2), policy="interleaved")
    assert run(scheduler) == ([], {0: 5, 1: 3}, 0, 1, [])
    assert run(scheduler) == ([], {2: 20}, 0, 1, [])
    assert run(scheduler) == ([0, 1, 2], {}, 28, 1, [1, 2])
    assert run(scheduler) == ([0], {}, 6, 1, [0])


def test_a_static_batch_keeps_its_slots_until_the_longest_ends():
    scheduler = scheduler_of((2, 2), (2, 4), (2, 3), policy="static", max_requests=2)
    assert run(scheduler) == ([], {0: 2, 1: 2}, 0, 1, [])
    assert run(scheduler) == ([0, 1], {}, 4, 1, [0])
    assert scheduler.num_live == 1
    assert run(scheduler) == ([0, 1], {}, 6, 2, [1])
    assert run(scheduler) == ([], {2: 2}, 0, 1, [])
    assert run(scheduler) == ([2], {}, 2, 2, [2])


def test_nothing_changes_until_the_first_request_ends():
    scheduler = scheduler_of((1, 50), (1, 30))
    run(scheduler)
    assert run(scheduler, 10)[3] == 29
    assert run(scheduler)[3:] == (19, [1])
    assert run(scheduler)[3:] == (20, [0])


def test_the_request_that_came_last_is_preempted_and_prefilled_again():
    # Six pages of four: 8 tokens each fill four of them; each takes a fifth and a sixth page, then one is missing.
    scheduler = scheduler_of((8, 12), (8, 6), num_pages=6, token_budget=16)
    run(scheduler)
    assert run(scheduler)[3] == 4
    step = scheduler.plan()
    assert (numbers(step.preempted), numbers(step.decode), step.repeats) == ([1], [0], 1)
    scheduler.commit(step)
    again = scheduler.waiting[0]
    assert (again.request.number, again.produced, again.uncached) == (1, 5, 13)
    assert run(scheduler)[:2] == ([0], {})  # 13 tokens need four pages, and request 0 holds four
    while scheduler.load:
        last = run(scheduler)
    assert last[4] == [1]
    assert scheduler.pages.room == 6


def test_pages_that_run_out_end_a_jump():
    scheduler = scheduler_of((4, 20), (4, 20), num_pages=6, max_requests=2)
    run(scheduler)
    assert run(scheduler)[3] == 8  # both fill their third pages
    assert numbers(scheduler.plan().preempted) == [1]


def test_a_prefix_is_computed_once():
    scheduler = scheduler_of((9, 2), (9, 2), (8, 2), prefix=3, prefix_len=8, prefix_cache=True, max_requests=1)
    assert run(scheduler)[1] == {0: 8}
    assert run(scheduler)[1] == {0: 1}
    run(scheduler)
    assert run(scheduler)[1] == {1: 1}
    run(scheduler)
    assert run(scheduler)[1] == {2: 4}  # of 8 tokens known, the last page is computed again for its next token


def test_a_waiting_request_is_admitted_with_room_to_spare():
    scheduler = scheduler_of((4, 2), (4, 2), num_pages=10, watermark=0.9)
    assert run(scheduler)[1] == {0: 4}
    assert numbers(scheduler.waiting) == [1]


def test_a_stopped_request_frees_its_pages():
    scheduler = scheduler_of((4, 20), (4, 20), (4, 20), max_requests=2)
    waiting = scheduler.waiting[2]
    run(scheduler)
    run(scheduler, 3)
    first = scheduler.running[0]
    scheduler.stop(waiting)
    scheduler.stop(first)
    assert run(scheduler)[0] == [1]
    assert (scheduler.load, scheduler.pages.room) == (0, 100)


def test_a_stopped_static_batch_ends():
    scheduler = scheduler_of((4, 20), (4, 2), policy="static")
    run(scheduler)
    run(scheduler)
    scheduler.stop(scheduler.running[0])
    assert (scheduler.load, scheduler.pages.room) == (0, 100)


def test_a_request_beyond_all_pages_is_refused():
    said = r"request 0 \(prompt 2,000, output 80 tokens\) needs 520 pages of 4 tokens, of 100 in all."
    with pytest.raises(InputError, match=said):
        scheduler_of((2000, 80))


def test_a_static_batch_takes_no_prefilled_requests():
    with pytest.raises(InputError, match="Give a decode pool the policy 'chunked'"):
        Scheduler(msgspec.structs.replace(BOUNDS, policy="static")).submit(
            GenerationRequest(number=0, prompt=2, output=2, prefilled=True)
        )


@settings(max_examples=50, deadline=None)
@given(traffic=traffic(), limits=limits(), data=st.data())
def test_no_bound_is_exceeded_and_every_page_comes_back(traffic, limits, data):
    scheduler = Scheduler(limits)
    for _, request in traffic.requests():
        handed_over = limits.policy != "static" and request.output > 1 and data.draw(st.booleans())
        scheduler.submit(msgspec.structs.replace(request, prefilled=handed_over))
    finished = []
    while (step := scheduler.plan()).repeats:
        assert len(scheduler.running) <= limits.max_requests
        if limits.policy == "chunked":
            assert len(step.decode) + step.prefill_tokens <= limits.token_budget
        finished += numbers(scheduler.commit(step, data.draw(st.integers(1, step.repeats)))[1])
        assert 0 <= scheduler.pages.num_free <= limits.num_pages
        held = sum(limits.pages(tokens_of(one, scheduler)) - one.shared_pages for one in scheduler.running.values())
        kept = sum(scheduler.pages.kept(prefix) for prefix in range(3))
        assert scheduler.pages.num_free + held + kept == limits.num_pages
    assert sorted(finished) == list(range(len(traffic)))
    assert (scheduler.load, scheduler.pages.room) == (0, limits.num_pages)


def tokens_of(active, scheduler):
    """Tokens whose pages a request holds between two steps."""
    return active.num_known if active.joined < 0 else active.cached + scheduler.round - active.joined


@settings(max_examples=100, deadline=None)
@given(traffic=traffic(), limits=limits(), data=st.data())
def test_an_engine_writes_what_each_request_alone_would_get(traffic, limits, data):
    """Also if its text ends before the most tokens that it may have."""
    scheduler, engine = Scheduler(limits), MockEngine(traffic)
    outputs = {}
    for _, request in traffic.requests():
        scheduler.submit(request)
        outputs[request.number] = data.draw(st.integers(1, request.output))
    while (step := scheduler.plan()).repeats:
        engine.run(step)
        scheduler.commit(step)
        for active in list(scheduler.running.values()):
            number = active.request.number
            if active.joined >= 0 and len(engine.texts[number]) - active.request.prompt == outputs[number]:
                scheduler.stop(active)
    for _, request in traffic.requests():
        alone = engine.alone(request.number, request.output)
        text = engine.texts[request.number]
        assert text[: request.prompt + outputs[request.number]] == alone[: request.prompt + outputs[request.number]]
    assert scheduler.pages.room == limits.num_pages


def with_sources(*lengths, **bounds):
    """A scheduler with requests of (prompt, output, source, its length)."""
    scheduler = Scheduler(msgspec.structs.replace(BOUNDS, **bounds))
    for number, (prompt, output, source, length) in enumerate(lengths):
        scheduler.submit(
            GenerationRequest(number=number, prompt=prompt, output=output, source=source, source_len=length)
        )
    return scheduler


def test_a_source_has_its_pages_once_and_while_requests_read_it():
    scheduler = with_sources((1, 2, "a", 6), (1, 4, "a", 6), num_pages=9)
    step = scheduler.plan()
    assert (numbers(step.admitted), step.sources, scheduler.pages.room) == ([0, 1], (6,), 9 - 2 - 2 * 1)
    scheduler.commit(step)
    assert run(scheduler)[-1] == [0]
    assert scheduler.pages.room == 9 - 2 - 1, "the other still reads it"
    while scheduler.running:
        run(scheduler)
    assert (scheduler.pages.room, scheduler.pages.sources) == (9, {})


def test_who_has_no_room_for_its_source_waits():
    scheduler = with_sources((1, 2, "a", 16), (1, 2, "b", 16), (1, 2, "a", 16), num_pages=9)
    step = scheduler.plan()
    assert (numbers(step.admitted), step.sources, scheduler.pages.room) == ([0], (16,), 4)
    scheduler.commit(step)
    assert run(scheduler)[-1] == [0]
    assert numbers(scheduler.plan().admitted) == [1], "the next in turn, whoever shares a source"
    with pytest.raises(InputError, match=r"source 33 tokens\) needs 10 pages"):
        with_sources((1, 2, "a", 33), num_pages=9)


def test_tokens_of_sources_count_in_the_budget_of_a_step():
    scheduler = with_sources((1, 2, "a", 30), (1, 2, "b", 5), policy="chunked")
    assert scheduler.plan().sources == (30,), "one may be beyond it"
    scheduler = with_sources((1, 2, "a", 3), (1, 2, "b", 3), (1, 2, "c", 3), policy="interleaved")
    assert scheduler.plan().sources == (3, 3)


def test_who_lost_its_pages_has_its_source_read_again():
    scheduler = with_sources((4, 9, "a", 4), (4, 9, "b", 4), num_pages=5, token_budget=16)
    first = scheduler.plan()
    assert first.sources == (4, 4)
    scheduler.commit(first)
    second = scheduler.plan()
    assert (numbers(second.preempted), numbers(second.decode), set(scheduler.pages.sources)) == ([1], [0], {"a"})
    scheduler.commit(second)
    sources = list[int]()
    while not sources:
        step = scheduler.plan()
        sources += step.sources
        scheduler.commit(step, step.repeats)
    assert (sources, numbers(step.admitted)) == ([4], [1])
