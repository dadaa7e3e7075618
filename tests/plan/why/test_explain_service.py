"""`explain` of a service: every formula, with the numbers that are printed, gives the figure that the search gave."""

import math
import re

import pytest

from meshwright.core.dims import COLLECTIVES
from meshwright.cost.network.collectives import received_share
from meshwright.plan.why.explain_service import STARTS, explain_service
from tests.plan.test_service_file import planned
from tests.tier import sampled

SERVICES = {
    "both phases on the same chips": ("llama3-70b", "h100:8x2", {"tpot_s": 0.1}),
    "pools": ("llama3-70b", "v5e:8x8", {"tpot_s": 0.05}),
    "a load, experts": ("deepseek-v3", "h200:8x4", {"tpot_s": 0.1, "requests_per_s": 3.0}),
    "cached prompts": ("llama3-8b", "h100:8x1", {"prefix_share": 0.5}),
    "cached prompts, pools": ("llama3-8b", "v5e:4x8", {"prefix_share": 0.25, "ttft_s": 0.3, "tpot_s": 0.02}),
}
FIGURES = {
    "TTFT": "ttft_s", "TPOT": "tpot_s", "requests/s": "requests_per_s", "tok/s/chip": "tokens_per_s_per_chip",
    "$/M in": "usd_per_m_input", "$/M out": "usd_per_m_output", "memory left": "free_bytes",
}  # fmt: skip


@pytest.fixture(scope="module", params=sampled(SERVICES, "pools", "a load, experts", "cached prompts"))
def told(request):
    model, cluster, service = SERVICES[request.param]
    _, file = planned(model, cluster, **service)
    return explain_service(file)


def by_hand(numbers):
    """The value of a printed formula, as a person with a calculator finds it."""
    plain = re.sub(r" GB(/s)?", "e9", numbers).replace(" s", "").replace(" x ", " * ")
    assert re.fullmatch(r"[-+*/(), \d.e]*", re.sub("max|min|exp", "", plain)), plain
    return eval(plain, {"__builtins__": {}, "max": max, "min": min, "exp": math.exp})


def test_the_figures_are_those_of_the_search(told):
    for name, field in FIGURES.items():
        assert told.value(name) == pytest.approx(getattr(told.plan.predicted, field), rel=1e-6), name


def test_the_printed_numbers_give_the_figures(told):
    for one in told.formulas:
        allowed = 2e-3 if one.name != "memory left" else 0.05  # a difference of rounded numbers
        assert by_hand(one.numbers) == pytest.approx(one.value, rel=allowed), f"{one.name}: {one.numbers}"


def test_each_phase_is_listed_and_adds_up(told):
    for phase in told.phases:
        assert sum(term.added_s for term in phase.terms) == pytest.approx(phase.step_s)
        titles = [part.title.removeprefix(f"{phase.phase}: ") for part in phase.blocks]
        assert (titles[0], titles[-1]) == ("embed", "head")
        assert sum(phase.repeats[1:-1]) == told.plan.model.num_layers
        lines = [line for part in phase.blocks for line in part.lines]
        assert all(line.phase == "forward" for line in lines)
        assert {part.name for part in phase.parts} >= {"parameters", "KV", "FLOPs", "other"}
        alone_s = {part.name: part.alone_s for part in phase.parts}
        if STARTS in alone_s:  # part of what the host takes
            alone_s["host"] += alone_s.pop(STARTS)
        for name, seconds in alone_s.items():
            assert seconds == pytest.approx(phase.pool.bounds_s[name]), name
        assert sum(phase.memory.values()) == pytest.approx(sum(phase.pool.memory.values()))


def test_bytes_of_the_network_are_what_a_chip_receives(told):
    """Lines have the arrays of their collectives."""
    for phase in told.phases:
        sizes = [size for size in phase.pool.strategy.mesh.values() if size > 1]
        if len(sizes) == 1:
            received = sum(
                repeat * line.num_bytes * received_share(line.op, sizes[0])
                for part, repeat in zip(phase.blocks, phase.repeats, strict=True)
                for line in part.lines
                if line.op in COLLECTIVES
            )
            (amount,) = (part.amount for part in phase.parts if part.name == "network")
            assert amount == pytest.approx(received)


def test_parameters_and_caches_are_counted(told):
    """A decode step loads each weight that it uses once, and the caches of all sequences at their mean length."""
    decode = told.phases[0]
    amount = {part.name: part.amount for part in decode.parts}
    if told.plan.model.num_experts:  # some experts have no token in a step
        assert amount["parameters"] < decode.memory["weights"]
    else:  # products also read and write rows of activations, and the table of tokens is not read whole
        assert 0.9 < amount["parameters"] / decode.memory["weights"] < 1.5
    caches = decode.memory["kv_cache"] * decode.num_positions / told.plan.service.max_len
    # queries and results of latent attention are wide beside its caches
    most = 1.5 if told.plan.model.latent_attention else 1.1
    assert caches < amount["KV"] < most * caches
