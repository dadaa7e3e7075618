"""`meshwright bench serve` from the command line: a server that runs, one of a folder, and refusals."""

import asyncio
from threading import Event, Thread

import pytest
from msgspec.structs import replace

from meshwright.nn.hf.weights import save_hf
from tests.parallel.generate_cases import LLAMA, float_params
from tests.serve.http.fake import FakeEngine, letters, listening

MODEL = replace(LLAMA, name="tiny", vocab_size=64, d_model=16, d_ff=16)


@pytest.fixture
def url():
    """The URL of a server whose steps take 5 ms."""
    ports, stop, ready = [], Event(), Event()

    async def serve() -> None:
        async with listening(FakeEngine(delay_s=0.005, says=letters().encode("a").ids * 100)) as (_, port):
            ports.append(port)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    yield f"http://127.0.0.1:{ports[0]}"
    stop.set()
    thread.join()


def test_a_running_server_is_measured_at_one_rate(call, url):
    said = call("bench", "serve", "--url", url, "--rate", "40/s", "--requests", "20", "--prompt", "4", "--output", "5")
    assert said.code == 0, said.err
    assert "toy: prompts 4, outputs 5 tokens" in said.words
    assert "20 requests, 40 a second" in said.words
    assert "TTFT p50" in said.words
    assert "predicted" not in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines())


def test_several_rates_are_a_table_and_a_picture(call, url, tmp_path):
    given = ("--requests", "10", "--prompt", "4", "--output", "1..6", "--ttft", "1s", "--png", "load.png")
    said = call("bench", "serve", "--url", url, "--rates", "40/s,80/s", *given, "--json")
    assert said.code == 0, said.err
    assert [round(one["rate_per_s"]) for one in said.json["rates"]] == [40, 80]
    assert said.json["rates"][0]["measured"]["met"] == 1
    assert said.json["rates"][0]["predicted"] is None
    assert (tmp_path / "load.png").exists()


def test_a_trace_is_sent(call, url, tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt,output\n0,4,3\n0.1,5,2\n0.3,6,4\n")
    said = call("bench", "serve", "--url", url, "--trace", "trace.csv", "--json")
    assert said.code == 0, said.err
    assert said.json["rates"][0]["num_requests"] == 3


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ((), 2, "nothing to measure"),
        (("--url", "http://127.0.0.1:9"), 2, "no capacity is known"),
        (("--url", "http://127.0.0.1:9", "--rate", "often"), 2, "not a rate"),
        (("--url", "http://127.0.0.1:9", "--rate", "5/s"), 3, "does not answer"),
        (("--url", "http://127.0.0.1:9", "--rate", "5/s", "--prompt", "many"), 2, "not understood"),
    ],
)
def test_what_cannot_be_is_one_line(call, given, code, words):
    call("bench", "serve", *given).assert_refused(code, words)


def test_a_folder_that_is_none_is_said_by_the_other_process(call):
    said = call("bench", "serve", "nowhere")
    assert said.code == 2
    assert "nowhere" in said.err.splitlines()[-1]


def test_bench_lists_both(call):
    said = call("bench", "--help")
    assert "machine" in said.out
    assert "serve" in said.out


@pytest.mark.slow
def test_a_folder_is_served_and_predicted(call, tmp_path):
    save_hf(MODEL, float_params(MODEL), tmp_path / "tiny")
    given = ("--max-requests", "4", "--max-len", "64", "--token-budget", "16", "--on", "cpu:1")
    said = call(
        *("bench", "serve", "tiny", *given, "--prompt", "8", "--output", "8", "--rates", "5/s,10/s"),
        *("--requests", "20", "--json"),
    )
    assert said.code == 0, said.err
    assert said.json["capacity_per_s"] > 10
    assert 0 < said.json["clock"]["decode_s"][0] < 1
    for one in said.json["rates"]:
        assert one["predicted"]["num_requests"] == one["measured"]["num_requests"]
        assert 0.8 < one["ratios"]["tokens/s"] < 1.2
