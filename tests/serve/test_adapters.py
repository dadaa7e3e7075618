"""Several adapters in one engine: every row has the numbers of its own one, as merged weights give them."""

import asyncio
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import InputError
from meshwright.nn.hf.adapter import base_folder
from meshwright.nn.hf.weights import load_params, save_adapter, save_hf, source_of
from meshwright.nn.quantisation import stored_params
from meshwright.nn.weights import Params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.drawing.drafts import ModelDrafter
from meshwright.serve.engine import Engine
from meshwright.serve.frontend import Frontend
from meshwright.serve.group import EngineGroup
from meshwright.serve.http.app import make_app
from meshwright.serve.http.served import served_model
from meshwright.serve.model_folder import open_model
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh
from tests.logits import logits_fn
from tests.parallel.generate_cases import LLAMA, dequantise_params, float_params, likeliest

ADAPTERS = {
    "sql": Lora(rank=3, alpha=6, targets="q,v"),
    "chat": Lora(rank=2, alpha=1, targets="all-linear"),
    "mail": Lora(rank=5, alpha=5, targets="o,down"),
}
NAMES = ("", *ADAPTERS)
PROMPTS = [[5, 9, 60, 2, 7, 7, 1, 8, 30], [3], [11, 12, 13], list(range(20, 37))]
Answers = dict[tuple[str, int], tuple[list[int], list[float]]]
MAX_LEN, PAGE_LEN, NUM_PAGES, NUM_TOKENS = 32, 4, 40, 6


def adapted_params(lora: Lora, seed: int, model=LLAMA) -> Params:
    """Weights of the base and an adapter that matters."""
    found = float_params(replace(model, lora=lora), seed)
    return found | float_params(model)


def merged(lora: Lora, params: Params) -> Params:
    """The base with W + (alpha / rank) A B, in float64."""
    found = {}
    for name, weight in params.items():
        if "_lora_" not in name:
            found[name] = np.asarray(weight, np.float64)
            if f"{name}_lora_b" in params:
                a, b = (np.asarray(params[f"{name}_lora_{letter}"], np.float64) for letter in "ab")
                found[name] += (
                    lora.alpha / lora.rank * np.stack([np.tensordot(*ab, 1) for ab in zip(a, b, strict=True)])
                )
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in found.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The base under "", and its adapters."""
    top = tmp_path_factory.mktemp("adapters")
    save_hf(LLAMA, float_params(LLAMA), top / "tiny")
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        model, params = replace(LLAMA, lora=lora), adapted_params(lora, seed)
        save_adapter(model, *source_of(params), top / name, base="not there")
    return {"": top / "tiny"} | {name: top / name for name in ADAPTERS}


def adapters_of(folders) -> dict[str, Path]:
    return {name: folder for name, folder in folders.items() if name}


def engine_of(folders, *, axes=None, weights="", batch_invariant=False, drafter=None) -> Engine:
    source = open_model(folders[""], adapters_of(folders))
    sizes = {"page_len": PAGE_LEN, "num_pages": NUM_PAGES}
    storage = Storage(cache_dtype="fp32", weights=weights, adapters=len(source.adapters), **sizes)
    strategy = Strategy(mesh=make_mesh(axes or {}), state="fp32")
    given = {"max_len": MAX_LEN, "max_seqs": 8, "storage": storage, "batch_invariant": batch_invariant}
    step = PackedStep(source.model, strategy, **given)
    loaded = load_params(
        source.model, source.folder, step.loaded_shardings, jnp.float32, list(source.adapters.values())
    )
    drafts = drafter.num_drafts if drafter else 0
    limits = SchedulerLimits(max_requests=8, token_budget=24, prefix_cache=True, num_drafts=drafts, **sizes)
    return Engine(step, step.place(loaded), limits, drafter=drafter, adapters=tuple(source.adapters))


@pytest.fixture(scope="module")
def engine(folders) -> Engine:
    return engine_of(folders)


def request(prompt, adapter="", **options) -> TokenRequest:
    return TokenRequest(prompt=tuple(prompt), adapter=adapter, **{"max_tokens": NUM_TOKENS, "logprobs": 0, **options})


def answers_of(weights: dict[str, Params]) -> Answers:
    """The likeliest tokens after each prompt and their log-probabilities, by weights and place of the prompt."""
    found, logits = {}, jax.jit(logits_fn(LLAMA))
    for name, params in weights.items():
        for place, prompt in enumerate(PROMPTS):
            tokens = likeliest(LLAMA, params, prompt, NUM_TOKENS)
            padded = np.array([[*prompt, *tokens, *[0] * (MAX_LEN - len(prompt) - NUM_TOKENS)]], np.int32)
            every = np.asarray(jax.nn.log_softmax(logits(params, padded)[0]))[len(prompt) - 1 :]
            found[name, place] = tokens, [every[at, token] for at, token in enumerate(tokens)]
    return found


@pytest.fixture(scope="module")
def wanted() -> Answers:
    """What each adapter says, merged with its base."""
    own = {name: merged(lora, adapted_params(lora, seed)) for seed, (name, lora) in enumerate(ADAPTERS.items())}
    return answers_of({"": float_params(LLAMA)} | own)


def assert_as_merged(engine: Engine, wanted: Answers) -> None:
    """Prompts under every adapter in one batch: tokens and log-probabilities of merged weights' forward pass."""
    asked = [(name, place) for place in range(len(PROMPTS)) for name in NAMES]
    found = engine.run([request(PROMPTS[place], name) for name, place in asked])
    for outputs, (tokens, logprobs) in zip(found, (wanted[each] for each in asked), strict=True):
        assert [one.token for one in outputs] == tokens
        np.testing.assert_allclose([one.logprob.logprob for one in outputs], logprobs, rtol=0, atol=1e-4)
    assert len({tuple(wanted[name, 0][0]) for name in NAMES}) == len(NAMES)


def test_every_row_has_the_numbers_of_its_own_adapter(engine, wanted):
    """Ranks and targets differ, and rows of the base are in the batch too."""
    assert_as_merged(engine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, pytest.param({"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow)]
)
def test_adapters_are_split_over_devices_as_their_weights_are(folders, wanted, axes):
    assert_as_merged(engine_of(folders, axes=axes), wanted)


@pytest.mark.slow
def test_drafts_are_checked_by_the_adapter_of_their_request(folders, wanted):
    """The base proposes tokens for all; that of one adapter would be wrong for others."""
    base = engine_of({"": folders[""]})
    engine = engine_of(folders, drafter=ModelDrafter(base.packed, base._params, 2))
    assert_as_merged(engine, wanted)
    state = engine.state()
    assert 0 < state.accepted < state.drafted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int4", "fp8"))])
def test_adapters_stay_as_they_are_beside_narrow_weights(folders, dtype):
    """What the narrow weights stand for, plus products of the adapters that are not rounded."""
    base = dequantise_params(LLAMA, dtype, stored_params(LLAMA, float_params(LLAMA), dtype))
    own = (merged(lora, adapted_params(lora, seed) | base) for seed, lora in enumerate(ADAPTERS.values()))
    assert_as_merged(engine_of(folders, weights=dtype), answers_of(dict(zip(NAMES, [base, *own], strict=True))))


def test_prompts_under_different_adapters_share_no_pages(folders, wanted):
    """A page has 4 positions; of a prompt of 17 tokens four are kept."""
    engine, prompt = engine_of(folders), PROMPTS[3]
    for hits in (0, 16):
        for name in NAMES:
            (outputs,) = engine.run([request(prompt, name)])
            assert outputs[0].cached == hits
            assert [one.token for one in outputs] == wanted[name, 3][0]
    pages = [tuple(prompt[at : at + 4]) for at in range(0, 16, 4)]
    assert [one.tokens for one in engine.snapshot().tree if one.tokens in pages] == 4 * pages
    # the engine that knows a prompt of this adapter gets it
    group = EngineGroup([engine_of({"": folders[""]}), engine])
    assert [one.order(request(prompt, "sql"))[1] for one in group.engines] == [0, -4]


def test_an_adapter_is_the_same_bit_by_bit_in_any_batch(folders):
    engine, needle = engine_of(folders, batch_invariant=True), request(PROMPTS[3], "chat")
    found = []
    for company in ([], ["sql"], ["", "mail", "chat"], list(NAMES) * 4):
        others = [request(PROMPTS[place % 4], name) for place, name in enumerate(company)]
        outputs = engine.run([*others, needle, *others])[len(others)]
        found.append([one.logprob for one in outputs])
    assert found[1:] == found[:1] * 3


# -- what cannot be ---------------------------------------------------------------------------------------


def test_an_unknown_adapter_is_refused_with_the_nearest(engine):
    with pytest.raises(InputError, match=r"no adapter 'sqll'\. Did you mean 'sql'\?"):
        engine.submit(request([1], "sqll"))
    with pytest.raises(InputError, match=r"the step has 3 adapters, and 0 names are given"):
        Engine(engine.packed, engine._params, engine.limits)


def test_an_adapter_of_another_base_is_one_line(folders, tmp_path):
    wide = replace(LLAMA, head_dim=10, lora=ADAPTERS["sql"])
    save_adapter(wide, *source_of(adapted_params(wide.lora, 0, replace(wide, lora=None))), tmp_path / "wide", base="x")
    with pytest.raises(InputError, match=r"wide: base_model\S+lora_B\S+ is \(80, 3\); tiny needs \(64, 3\)\. Give an "):
        engine_of(folders | {"wide": tmp_path / "wide"})
    deep = replace(LLAMA, num_layers=3, lora=ADAPTERS["sql"])
    save_adapter(deep, *source_of(adapted_params(deep.lora, 0, replace(deep, lora=None))), tmp_path / "deep", base="x")
    with pytest.raises(
        InputError, match=r"layers\.2\.\S+ is \(3, 32\); tiny needs no such tensor\. Give an adapter of"
    ):
        engine_of(folders | {"deep": tmp_path / "deep"})


def test_a_base_is_named_from_the_adapter_or_from_here(folders, tmp_path, monkeypatch):
    """PEFT writes the path that the base was loaded from, which may start at the current folder."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    with pytest.raises(InputError, match=r"names the base model 'models/base', a folder that is neither in "):
        base_folder(adapter)
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_folder(adapter).samefile("models/base")
    (adapter / "models" / "base").mkdir(parents=True)
    assert base_folder(adapter).samefile(adapter / "models" / "base")


def test_what_is_no_adapter_or_no_base_is_one_line(folders):
    with pytest.raises(InputError, match=r"tiny has no adapter_config\.json"):
        open_model(folders[""], {"a": folders[""]})
    (folders["sql"] / "not there").symlink_to(folders[""])
    with pytest.raises(InputError, match=r"sql is an adapter itself\. Serve its base"):
        open_model(folders["sql"], {"a": folders["chat"]})


# -- over HTTP --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_choose_an_adapter_by_its_name(folders, wanted):
    sizes = {"max_len": MAX_LEN, "max_requests": 4, "token_budget": 16, "page_len": PAGE_LEN, "mesh": {"tensor": 1}}
    opened = open_engine(folders[""], EngineOptions(adapters=adapters_of(folders), **sizes), in_background=False)
    assert "3 adapters of up to rank 5" in opened.lines[0]
    app = make_app(Frontend(opened.engine), served_model(opened.source, "base"))
    with pytest.raises(InputError, match="the base and an adapter are both called 'sql'"):
        served_model(opened.source, "sql")

    async def run():
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
        ):

            async def ask(path="/v1/completions", **body):
                found = await client.post(path, json={"max_tokens": NUM_TOKENS, "temperature": 0, **body})
                return found.status_code, found.json()

            cards = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
                ("base", None, "base"),
                *((name, "base", "base") for name in ADAPTERS),
            ]
            assert (await client.get("/v1/models/chat")).json() == cards[2]
            models = ["base", *ADAPTERS]
            answers = await asyncio.gather(*(ask(model=model, prompt=PROMPTS[0]) for model in models))
            for model, (status, answer) in zip(models, answers, strict=True):
                assert (status, answer["model"]) == (200, model)
                tokens, _ = wanted["" if model == "base" else model, 0]
                assert answer["choices"][0]["text"] == "".join(f" {token}" for token in tokens)
            assert (await ask(prompt=PROMPTS[0]))[1]["choices"] == answers[0][1]["choices"]
            status, answer = await ask(model="sq", prompt=[1])
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert answer["error"]["message"].endswith("not served here; 'base', 'sql', 'chat', 'mail' are.")

    asyncio.run(run())


# -- beside PEFT ------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "family", ["phi3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama-biases", "gpt2"))]
)
def test_adapters_have_the_logits_of_peft(family, tmp_path):
    """PEFT wrote both; one has dropout, which only training uses, the other is scaled by the root of its rank."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed: make test installs it")
    from tests.nn.families import CONFIGS
    from tests.parity import their_model

    theirs = their_model(CONFIGS[family])
    theirs.save_pretrained(tmp_path / "base")
    attention = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"]}.get(family, ["q_proj", "k_proj"])
    both = {"task_type": "CAUSAL_LM", "fan_in_fan_out": family == "gpt2"}
    settings = {
        "one": peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1, **both),
        "two": peft.LoraConfig(r=2, lora_alpha=2, target_modules=attention, use_rslora=True, **both),
    }
    theirs = peft.get_peft_model(theirs, settings["one"], adapter_name="one")
    theirs.add_adapter("two", settings["two"])
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    theirs.eval()
    engine = engine_of({"": tmp_path / "base", "one": tmp_path / "one", "two": tmp_path / "two"})
    asked = [(name, prompt) for prompt in PROMPTS[::3] for name in settings]
    outputs = engine.run([request(prompt, name, echo=True, max_tokens=0) for name, prompt in asked])
    for (name, prompt), (output,) in zip(asked, outputs, strict=True):
        theirs.set_adapter(name)
        with torch.no_grad():
            every = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0], -1).numpy()
        expected = [every[place, token] for place, token in enumerate(prompt[1:])]
        np.testing.assert_allclose([one.logprob for one in output.prompt], expected, rtol=0, atol=1e-4)
