"""Figures of steps: what Prometheus reads, and the line of the log."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.serve.frontend import Frontend
from meshwright.serve.http.metrics import ServerMetrics
from meshwright.serve.http.run import DrainingServer, Listening
from meshwright.serve.request import EngineState, TokenOutput
from meshwright.serve.step_sums import StepSums
from tests.serve.http.fake import FakeEngine, bench, in_loop

DECODE, MIXED = ("decode", 64), ("mixed", 256)
SUMS = {
    DECODE: StepSums(
        steps=500, seconds=8.45, decoded=30_000, cached=6e7, prefilled=0, pairs=0, positions=6e7, outputs=30_000
    ),
    MIXED: StepSums(
        steps=20, seconds=1.5, decoded=1_000, cached=2e6, prefilled=4_000, pairs=4e5, positions=2e6, outputs=1_100
    ),
}


class FlatPrices:
    """Each step takes 10 ms, and the work that its contents say; remembers what it was asked."""

    clock = object()
    peak_flops_per_s, peak_bytes_per_s = 1e15, 1e12

    def __init__(self) -> None:
        self.asked = []

    def of(self, steps):
        self.asked.append(np.asarray(steps))
        decoded, cached, prefilled, *_ = np.transpose(steps)
        every = np.ones(len(steps))
        return np.stack([0.010 * every, 1.28e10 * every, 100 * cached, 1e10 * (decoded + prefilled)], axis=1)


def metrics_at(state=None, prices=None):
    """Metrics ten seconds after their start, with this state, by default a busy one, and some tokens."""
    state = state or EngineState(
        running=64, waiting=12, pages_used=65, num_pages=100, prefix_queries=1000, prefix_hits=400, sums=dict(SUMS)
    )
    clock = SimpleNamespace(at=0.0)
    frontend = SimpleNamespace(state=EngineState(), in_system=0)
    metrics = ServerMetrics("toy", frontend, now=lambda: clock.at)
    metrics.load_prices = lambda: prices
    clock.at = 10.0
    frontend.state, frontend.in_system = state, state.running + state.waiting
    metrics.prompt_tokens, metrics.generation_tokens = 123_456, 30_760
    return metrics, clock


def figures(metrics) -> dict[str, float]:
    lines = (line for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_line_of_a_busy_server_fits():
    line = metrics_at(prices=FlatPrices())[0].line()
    assert line == (
        "64 run, 12 wait; tokens/s 12.3 k in, 3.08 k out; cache 65%, hits 40%; decode 16.9 ms, planned 10 ms; "
        "MFU 3.5%, MBU 67%"
    )
    assert len(line) <= 120


def test_the_line_says_what_is_known():
    assert metrics_at()[0].line() == (
        "64 run, 12 wait; tokens/s 12.3 k in, 3.08 k out; cache 65%, hits 40%; decode 16.9 ms"
    )
    alone = EngineState(running=1, num_pages=4, sums={MIXED: SUMS[MIXED]})
    assert metrics_at(alone)[0].line() == "1 run, 0 wait; tokens/s 12.3 k in, 3.08 k out; cache 0%"


def test_a_line_counts_from_the_one_before():
    prices = FlatPrices()
    metrics, clock = metrics_at(prices=prices)
    metrics.line()
    clock.at += 10
    assert metrics.line() == ""  # nothing was done
    clock.at += 5
    more = StepSums(100, 2.0, 400, 8_000, 0, 0, 8_400, 400)
    metrics.frontend.state.sums[DECODE] = StepSums(*map(sum, zip(SUMS[DECODE], more, strict=True)))
    metrics.generation_tokens += 400
    line = metrics.line()
    assert "tokens/s 0 in, 80 out" in line
    assert "decode 20 ms, planned 10 ms" in line
    np.testing.assert_allclose(prices.asked[-1], [[4, 80, 0, 0, 84, 4]])  # the mean step of these alone
    assert figures(metrics)['meshwright:mfu{model_name="toy"}'] == pytest.approx(400 * 1e10 / 5 / 1e15)


def test_an_idle_server_loads_no_prices():
    metrics, _ = metrics_at(EngineState())
    metrics.load_prices = lambda: pytest.fail("nothing is to be priced")
    assert metrics.line() == ""
    assert "meshwright:mfu" not in metrics.text().decode()


def test_prometheus_reads_measured_beside_planned():
    metrics, _ = metrics_at(prices=FlatPrices())
    metrics.line()
    found = figures(metrics)

    def of(name, key):
        return found[f'meshwright:{name}_total{{kind="{key[0]}",model_name="toy",rows="{key[1]}"}}']

    for key, sums in SUMS.items():
        assert of("steps", key) == sums.steps
        assert of("step_seconds", key) == sums.seconds
        assert of("step_predicted_seconds", key) == pytest.approx(0.010 * sums.steps)
        assert of("weight_bytes", key) == pytest.approx(1.28e10 * sums.steps)
        assert of("kv_bytes", key) == pytest.approx(100 * sums.cached)
        assert of("flops", key) == pytest.approx(1e10 * (sums.decoded + sums.prefilled))
    flops, moved = 1e10 * 35_000, 1.28e10 * 520 + 100 * 6.2e7
    assert found['meshwright:mfu{model_name="toy"}'] == pytest.approx(flops / 10 / 1e15)
    assert found['meshwright:bandwidth_utilization{model_name="toy"}'] == pytest.approx(moved / 10 / 1e12)


def test_prometheus_reads_no_price_that_is_not_known():
    text = figures(metrics_at()[0])
    assert {name.split("{")[0] for name in text if name.startswith("meshwright:")} == {
        "meshwright:steps_total",
        "meshwright:step_seconds_total",
    }


def test_prices_that_fail_are_left_out_and_said(caplog):
    prices = FlatPrices()
    prices.of = lambda steps: 1 / 0
    metrics, _ = metrics_at(prices=prices)
    assert metrics.line().endswith("decode 16.9 ms")
    assert "steps are no longer predicted" in caplog.text
    assert "meshwright:flops_total{" not in str(figures(metrics))


class QueueingEngine(FakeEngine):
    """Says that each request was scheduled 0.2 s after it came."""

    def _next(self, number) -> TokenOutput:
        output, self.came = super()._next(number), getattr(self, "came", None) or time.perf_counter()
        return TokenOutput(number=number, token=output.token, finish=output.finish, admitted_s=self.came + 0.2)


@in_loop
async def test_the_time_in_the_queue_counts_once_a_request():
    async with bench(QueueingEngine()) as b:
        await b.complete(max_tokens=3)
        text = (await b.client.get("/metrics")).text
    assert 'vllm:request_queue_time_seconds_count{model_name="toy"} 1.0' in text
    assert 'vllm:request_queue_time_seconds_bucket{le="0.1",model_name="toy"} 0.0' in text
    assert 'vllm:request_queue_time_seconds_bucket{le="0.5",model_name="toy"} 1.0' in text


@in_loop
async def test_a_server_looks_every_ten_seconds():
    calls = []
    server = DrainingServer(None, Frontend(FakeEngine()), Listening(), on_line=lambda: calls.append(len(calls)))
    ended = [await server.on_tick(number) for number in range(300)]
    assert calls == [0, 1, 2]
    assert not any(ended)
