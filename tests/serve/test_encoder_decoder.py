"""An engine of an encoder and a decoder: the likeliest tokens of the training program, from a source that
is read once for all who share it."""

import base64
import io
import json
from functools import lru_cache

import httpx
import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.api.running import TextOptions, generate_text
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import InputError
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.frontend import Frontend
from meshwright.serve.http.app import make_app
from meshwright.serve.http.served import ServedModel
from meshwright.serve.model_folder import Text, open_model
from meshwright.serve.offline.bulk import USUAL, read_prompts
from meshwright.serve.request import SourceFeatures, TokenRequest
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh
from tests.logits import logits_fn
from tests.nn.families import CONFIGS
from tests.parallel.generate_cases import float_params
from tests.parallel.plain_encoder_decoder import T5, WHISPER
from tests.parity import their_model
from tests.serve.http.fake import in_loop

START, NUM_TOKENS, PAGE_LEN = 3, 7, 4
LENGTHS = (13, 16, 5, 13)
"""Positions of sources; the last is the first once more."""
SMALL = replace(T5, name="small", num_layers=1, encoder=Encoder(num_layers=1, length=16))


def sources(model):
    draw = np.random.default_rng(5).integers
    found = [tuple(draw(0, model.vocab_size, length).tolist()) for length in LENGTHS[:-1]]
    return [*found, found[0]]


def likeliest(model, params, source):
    """The tokens after the start, each by a pass of the training program over all before it."""
    forward, tokens = jax.jit(logits_fn(model)), np.full((1, 16), START, np.int32)
    for position in range(NUM_TOKENS):
        logits = forward(params, tokens, None, np.array([source], np.int32))
        tokens[0, position + 1] = np.argmax(logits[0, position])
    return tokens[0, 1 : NUM_TOKENS + 1].tolist()


def engine_of(model, params, axes=None, *, layout="prompts", num_pages=48, **limits):
    model = replace(model, encoder=replace(model.encoder, start_token=START))
    strategy = Strategy(mesh=make_mesh(axes or {}), state="fp32", assignment=LAYOUTS[layout])
    storage = Storage(page_len=PAGE_LEN, cache_dtype="fp32", num_pages=num_pages)
    step = PackedStep(model, strategy, max_len=16, max_seqs=4, storage=storage)
    bounds = {"max_requests": 4, "token_budget": 16, "page_len": PAGE_LEN, "num_pages": num_pages}
    return Engine(step, step.place(params), SchedulerLimits(**bounds | limits))


@lru_cache
def small_engine():
    return engine_of(SMALL, float_params(SMALL), token_budget=48)


def tokens_of(engine, requests):
    return [[output.token for output in outputs] for outputs in engine.run(requests)]


def requests_of(model):
    return [TokenRequest(prompt=source, max_tokens=NUM_TOKENS) for source in sources(model)]


@pytest.mark.parametrize(
    "model", [SMALL, *(pytest.param(model, marks=pytest.mark.slow) for model in (T5, WHISPER))], ids=lambda m: m.name
)
def test_greedy_text_is_that_of_the_forward_pass(model, monkeypatch):
    """With a bias of distances, and with tables of positions. Sources are read together as far as the budget of a step
    goes, and one that two share is read once."""
    params, read = float_params(model), []
    engine = small_engine() if model == SMALL else engine_of(model, params)
    encode = PackedStep.encode
    monkeypatch.setattr(
        PackedStep, "encode", lambda step, *args: read.append(args[-1].lengths.tolist()) or encode(step, *args)
    )
    assert tokens_of(engine, requests_of(model)) == [likeliest(model, params, source) for source in sources(model)]
    assert read == ([list(LENGTHS[:-1])] if model == SMALL else [[length] for length in LENGTHS[:-1]])
    assert engine.state().pages_used == 0, "a source leaves with its last reader"


@pytest.mark.slow
def test_who_lost_its_pages_has_its_source_read_again():
    """Each of two requests has room for its source and answer, not both for their whole answers at once."""
    params = float_params(T5)
    engine = engine_of(T5, params, num_pages=10, watermark=0.0)
    asked = [TokenRequest(prompt=source, max_tokens=12) for source in sources(T5)[:3:2]]
    expected = [likeliest(T5, params, request.prompt) for request in asked]
    assert [tokens[:NUM_TOKENS] for tokens in tokens_of(engine, asked)] == expected
    assert engine.state().preemptions
    assert engine.state().pages_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ({"data": 2, "tensor": 2}, "prompts"),
        ({"context": 2, "tensor": 2}, "prompts"),
        ({"fsdp": 2, "tensor": 4}, "gathered"),
        ({"context": 2, "tensor": 2}, "sequences"),
        ({"context": 2, "tensor": 2}, "positions"),
        ({"tensor": 8}, "prompts"),
    ],
    ids=str,
)
def test_meshes_draw_the_same_tokens(axes, layout):
    """Places of sequences, split heads, split positions of sources and of pages, and repeated heads."""
    model = replace(SMALL, num_heads=8, num_kv_heads=4, head_dim=4)
    params = float_params(model)
    found = tokens_of(engine_of(model, params, axes, layout=layout), requests_of(model))
    assert found == [likeliest(model, params, source) for source in sources(model)]


@in_loop
async def test_a_prompt_over_http_is_the_source():
    """The answer is the text alone; it may be as long as the decoder's positions, whatever the prompt's length."""
    source, frontend = sources(SMALL)[1], Frontend(small_engine())
    served = ServedModel(name="small", text=Text(), vocab_size=SMALL.vocab_size)
    app = make_app(frontend, served)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=600) as client,
    ):
        body = {"model": "small", "prompt": source, "temperature": 0, "max_tokens": 15}
        answer = (await client.post("/v1/completions", json=body)).json()
        expected = likeliest(SMALL, float_params(SMALL), source)
        assert answer["choices"][0]["text"].split()[:NUM_TOKENS] == [str(token) for token in expected]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (16, 15)
        for change in ({"max_tokens": 16}, {"prompt": [*source, 1]}, {"echo": True, "logprobs": 1}):
            assert (await client.post("/v1/completions", json=body | change)).status_code == 400


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


@in_loop
async def test_a_file_of_features_over_http_is_the_source():
    """In base64; the answer begins with the model's start tokens."""
    model = replace(WHISPER, encoder=replace(WHISPER.encoder, features=6))
    shape = 6, 2 * model.encoder.length
    values, other = np.random.default_rng(2).normal(size=(2, *shape)).astype(np.float32)
    engine = engine_of(model, float_params(model))
    (expected,) = tokens_of(engine, [TokenRequest(prompt=(START,), source=SourceFeatures(values), max_tokens=5)])
    served = ServedModel(name="speech", text=Text(), vocab_size=model.vocab_size)
    app = make_app(Frontend(engine), served)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=600) as client,
    ):
        texts = [base64.b64encode(npy(array)).decode() for array in (values, other[None], np.asfortranarray(values))]
        body = {"model": "speech", "prompt": texts, "temperature": 0, "max_tokens": 5}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]][::2] == [" ".join(map(str, expected))] * 2
        for prompt, words in (
            ("hello!", "not base64"),
            ([3, 4], "not base64"),
            (texts[0][:-8], "float32"),
            (base64.b64encode(npy(values[:, 1:])).decode(), "reads features"),
            (base64.b64encode(npy(np.tile(values, 2))).decode(), "reads features"),
            (base64.b64encode(b"RIFF....WAVE").decode(), "not a NumPy file"),
            (base64.b64encode(npy(np.full(shape, np.nan))).decode(), "not finite"),
        ):
            refused = await client.post("/v1/completions", json=body | {"prompt": prompt})
            assert (refused.status_code, words in refused.text) == (400, True), refused.text
        echoed = await client.post("/v1/completions", json=body | {"echo": True})
        assert (echoed.status_code, echoed.json()["error"]["param"]) == (400, "echo")


def test_a_file_of_features_is_a_prompt(tmp_path):
    """Of `generate`, by its name, also on a line of a file of prompts."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    theirs = their_model(CONFIGS["whisper"])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_decoder_ids": [[2, 7], [1, 9], [4, 8]]}))
    opened, shape = open_model(tmp_path), (10, 48)
    assert opened.model.encoder.start == (3, 9, 7, 8)
    values = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    (tmp_path / "a.npy").write_bytes(npy(values))
    prompt = str(tmp_path / "a.npy")
    found = generate_text(tmp_path, [prompt, prompt], TextOptions(max_tokens=4))
    assert found.texts[0] == found.texts[1]
    tokens = [*opened.model.encoder.start]
    for _ in range(4):
        with torch.no_grad():
            given = {"input_features": torch.tensor(values[None]), "decoder_input_ids": torch.tensor([tokens])}
            tokens.append(int(theirs(**given).logits[0, -1].argmax()))
    assert list(found.generated.completions[0].tokens) == tokens[-4:]
    (as_many_as_fit,) = generate_text(tmp_path, [prompt]).generated.completions  # of 40 positions
    assert 4 < len(as_many_as_fit.tokens) <= 40 - len(opened.model.encoder.start)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt}))
    (line,) = read_prompts(opened, lambda _: None, tmp_path / "a.jsonl", USUAL)
    assert line.request.source == SourceFeatures(values)
    for name, words in (("b.npy", "No such file"), ("config.json", "not a NumPy file")):
        with pytest.raises(InputError, match=words):
            opened.encode(str(tmp_path / name))


def test_what_could_never_run_is_refused():
    engine = small_engine()
    for request, words in (
        (TokenRequest(prompt=(1,) * 17, max_tokens=1), "source of 17 tokens.*has 16"),
        (TokenRequest(prompt=(64,), max_tokens=1), "token 64, outside"),
        (TokenRequest(prompt=(1,), max_tokens=16), "needs? 17 positions"),
        (TokenRequest(prompt=(1,), max_tokens=0, echo=True), "Leave echo out"),
    ):
        with pytest.raises(InputError, match=words):
            engine.submit(request)
