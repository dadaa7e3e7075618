"""What every route does: keys, ids, errors as JSON, limits, figures, logs, and its description."""

import asyncio
import json

import pytest

from meshwright import __version__
from tests.serve.http.fake import FakeEngine, bench, in_loop, letters

JSON = {"content-type": "application/json"}


@in_loop
async def test_the_small_routes():
    async with bench() as b:
        card = (await b.client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("toy", 512)
        assert (await b.client.get("/v1/models/toy")).json() == card
        assert (await b.client.get("/v1/models/a/b")).status_code == 404
        assert (await b.client.get("/version")).json() == {"version": __version__}
        assert (await b.client.get("/health")).status_code == 200
        assert (await b.client.get("/tokenizer_info")).json()["has_chat_template"]
        ids = list(letters().encode("né").ids)
        found = (await b.post("/tokenize", prompt="né", return_token_strs=True)).json()
        assert found == {"count": 3, "max_model_len": 512, "tokens": ids, "token_strs": ["n", "\ufffd", "\ufffd"]}
        assert (await b.post("/detokenize", tokens=[1, *ids])).json() == {"prompt": "</s>né"}
        chat = (await b.post("/tokenize", messages=[{"role": "user", "content": "x"}])).json()
        assert letters().decode(chat["tokens"]) == "<|user|>x<|assistant|>"
        assert (await b.post("/tokenize")).status_code == 400
        assert (await b.post("/detokenize", tokens=[999])).status_code == 400


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "the body: expected `object`, got `array`"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature: number out of range"),
        (b'{"prompt": "a", "n": 1' + b"0" * 400 + b"}", "n is 1000"),
        (b'{"prompt": "\\ud800 and more text"}', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON"),
        (b'{"user": ' + b"[" * 100_000, "not JSON"),
        (b'{"prompt": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", "prompt: expected"),
        (b'{"prompt": "a"} x', "not JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
    ],
)
@in_loop
async def test_bodies_that_are_no_request(raw, said):
    async with bench() as b:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await b.client.post(path, content=raw, headers=JSON)
            assert answer.status_code == 400
            if path == "/v1/completions":
                assert said in answer.json()["error"]["message"]


@in_loop
async def test_other_refusals_are_json_too(monkeypatch):
    monkeypatch.setattr("meshwright.serve.http.bodies.MOST_BODY_BYTES", 1_000)
    async with bench() as b:
        for headers in ({"content-type": "text/plain"}, {}, {"content-type": "application/x-www-form-urlencoded"}):
            answer = await b.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]
        typed = {"content-type": "application/json; charset=utf-8"}
        assert (await b.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=typed)).status_code == 200
        for path, method, status in (
            ("/nothing", "GET", 404),
            ("/v1/models/", "GET", 404),
            ("/v1/completions", "GET", 405),
            ("/health", "POST", 405),
        ):
            answer = await b.client.request(method, path)
            assert answer.status_code == status
            message = answer.json()["error"]["message"]
            assert ("/openapi.json" in message) == (path == "/nothing"), message
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
        assert (await b.complete("a" * 2_000)).status_code == 413

        async def chunks():
            for _ in range(30):
                yield b" " * 100

        assert (await b.client.post("/v1/completions", content=chunks(), headers=JSON)).status_code == 413


@in_loop
async def test_keys():
    async with bench(options={"api_keys": ("first", "second")}) as b:
        for key in ("", "Bearer", "Bearer wrong", "Bearer fir", "Basic first"):
            answer = await b.client.get("/v1/models", headers={"authorization": key})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]
        for key in ("first", "second"):
            assert (await b.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert (await b.client.get(path)).status_code == 200
        document = (await b.client.get("/openapi.json")).json()
        assert "401" in document["paths"]["/v1/completions"]["post"]["responses"]


@in_loop
async def test_request_ids():
    async with bench() as b:
        answer = await b.client.get("/health", headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        for bad in ("a b", "x" * 200, 'q"', ""):
            answer = await b.client.get("/health", headers={"x-request-id": bad})
            assert len(answer.headers["x-request-id"]) == 32


@in_loop
async def test_a_line_for_each_request(capsys):
    async with bench(options={"logs_requests": True}) as b:
        await b.complete("secret", max_tokens=5, n=2)
        await b.complete("secret", max_tokens="x")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["path"], first["status"], first["completion_tokens"]) == ("/v1/completions", 200, 10)
    assert first["finish_reasons"] == ["length", "length"]
    assert 0 < first["ttft_s"] < first["seconds"]
    assert first["tpot_s"] > 0
    assert second["status"] == 400
    assert "secret" not in str(first)


@in_loop
async def test_too_many_requests():
    async with bench(FakeEngine(delay_s=0.005), max_queued=2) as b:
        running = [asyncio.create_task(b.complete("a", max_tokens=100, ignore_eos=True)) for _ in range(2)]
        while b.frontend.in_system < 2:
            await asyncio.sleep(0.001)
        answer = await b.complete("a")
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]
        assert (await b.complete("a")).status_code == 200


@in_loop
async def test_a_server_that_stops_and_one_whose_engine_failed():
    async with bench(FakeEngine(delay_s=0.002)) as b:
        running = asyncio.create_task(b.complete("a", max_tokens=20))
        while not b.frontend.in_system:
            await asyncio.sleep(0.001)
        b.frontend.stop_taking()
        assert (await b.complete("a")).status_code == 503
        assert (await b.client.get("/health")).status_code == 503
        assert (await running).status_code == 200
    async with bench(FakeEngine(delay_s=0.002)) as b:
        running = [
            asyncio.create_task(b.complete("a", max_tokens=400, ignore_eos=True, stream=on)) for on in (False, True)
        ]
        await asyncio.sleep(0.05)
        b.engine.fails = MemoryError("no pages")
        whole, stream = await asyncio.gather(*running)
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "the engine failed: no pages."
        assert stream.status_code == 200
        assert "the engine failed: no pages." in stream.text.split("\n\n")[-3]
        assert stream.text.endswith("data: [DONE]\n\n")
        assert (await b.client.get("/health")).status_code == 503
        assert (await b.complete("a")).status_code == 503
        assert (await b.client.get("/metrics")).status_code == 200


@in_loop
async def test_a_deadline():
    async with bench(FakeEngine(delay_s=0.005), deadline_s=0.03) as b:
        answer = await b.complete("a", max_tokens=400, ignore_eos=True)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        await b.rest()


@in_loop
async def test_figures():
    async with bench() as b:
        await b.complete("abc", max_tokens=5)
        await b.complete("abc", max_tokens=5, stop="e")
        await b.rest()  # the engine hears of a stop string later than the client
        answer = await b.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
        label = '{model_name="toy"}'
        for name, value in {
            f"vllm:prompt_tokens_total{label}": 6,
            f"vllm:num_requests_running{label}": 0,
            f"vllm:num_requests_waiting{label}": 0,
            f"vllm:kv_cache_usage_perc{label}": 0,
            f"vllm:num_preemptions_total{label}": 0,
            f"vllm:prefix_cache_queries_total{label}": 0,
            f"vllm:prefix_cache_hits_total{label}": 0,
            f"vllm:external_prefix_cache_hits_total{label}": 0,
            'vllm:request_success_total{finished_reason="stop",model_name="toy"}': 1,
            'vllm:request_success_total{finished_reason="length",model_name="toy"}': 1,
            f"vllm:time_to_first_token_seconds_count{label}": 2,
            f"vllm:e2e_request_latency_seconds_count{label}": 2,
            f"vllm:request_time_per_output_token_seconds_count{label}": 2,
        }.items():
            assert float(found[name]) == value, name
        assert 6 <= float(found[f"vllm:generation_tokens_total{label}"]) <= 10
        gaps = float(found[f"vllm:inter_token_latency_seconds_count{label}"])
        assert gaps == float(found[f"vllm:generation_tokens_total{label}"]) - 2
        assert float(found['vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="toy"}']) == gaps


@in_loop
async def test_the_description_names_what_there_is():
    async with bench() as b:
        document = (await b.client.get("/openapi.json")).json()
        routes = {route.path.replace(":path", "") for route in b.app.routes}
        assert set(document["paths"]) == routes
        text = json.dumps(document)
        for ref in {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
            assert ref in document["components"]["schemas"]
        posted = document["paths"]["/v1/completions"]["post"]
        assert set(posted["responses"]) == {"200", "400", "404", "413", "429", "503", "504"}
        fields = document["components"]["schemas"]["CompletionBody"]
        assert fields["required"] == ["prompt"]
        assert fields["additionalProperties"] is False
        assert {"temperature", "top_k", "user", "min_p"} <= set(fields["properties"])
        assert len({one["operationId"] for path in document["paths"].values() for one in path.values()}) == len(routes)
