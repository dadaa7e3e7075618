"""Greedy tokens of the engine beside `generate` of transformers, for random checkpoints of every family."""

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import read_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.request import SourceFeatures, TokenRequest
from meshwright.spec.strategy import Strategy, make_mesh
from tests import parity
from tests.nn.families import FAMILIES

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
LENGTHS, NUM_TOKENS, PAGES = (20, 1, 13), 8, 24
MARGIN = 1e-4
"""Two likeliest logits may be so close that rounding decides, in logits that are not scaled: texts are compared up to
there."""


START = 0
"""Token that the text of a decoder beside an encoder begins with."""


@pytest.mark.parametrize("case", [c if c == "gemma2" else pytest.param(c, marks=pytest.mark.slow) for c in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(case):
    """Prompts of three lengths in chunks beside decoding rows, or sources; each alone in transformers."""
    theirs, model = parity.their_model(parity.config_of(case)), parity.model_of(case)
    start = {"decoder_start_token_id": START} if model.encoder else {}
    if model.encoder:
        theirs.generation_config.update(forced_eos_token_id=None, forced_bos_token_id=None)
        model = replace(model, encoder=replace(model.encoder, start_token=START))
    prompts = [parity.tokens_of(model)[0, row, :length].tolist() for row, length in enumerate(LENGTHS)]
    storage = Storage(cache_dtype="fp32", page_len=4, num_pages=PAGES)
    strategy = Strategy(mesh=make_mesh({}), state="fp32")
    step = PackedStep(model, strategy, max_len=32, max_seqs=4, storage=storage)
    limits = SchedulerLimits(max_requests=4, token_budget=16, page_len=4, num_pages=PAGES)
    engine = Engine(step, step.place(read_params(model, parity.state_of(theirs))), limits)
    requests = [TokenRequest(prompt=tuple(prompt), max_tokens=NUM_TOKENS, logprobs=2) for prompt in prompts]
    if model.encoder and model.encoder.features:
        check_of_features(theirs, engine, model)
        return
    for prompt, outputs in zip(prompts, engine.run(requests), strict=True):
        given = torch.tensor([prompt])
        length = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
        with torch.no_grad():
            expected = theirs.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **length, **start)
        margins = [float(np.subtract(*(each for _, each in one.logprob.top))) for one in outputs]
        least = MARGIN * model.logit_multiplier / model.logit_divisor
        sure = next((place for place, margin in enumerate(margins) if margin < least), NUM_TOKENS)
        assert sure >= NUM_TOKENS // 4
        assert [one.token for one in outputs][:sure] == expected[0, -NUM_TOKENS:].tolist()[:sure]


def check_of_features(theirs, engine, model):
    """Of two sources one is asked for twice. Tokens of transformers come one by one: its loop has rules of speech."""
    shape = model.encoder.features, 2 * model.encoder.length
    arrays = [np.random.default_rng(number).normal(size=shape).astype(np.float32) for number in (0, 1, 0)]
    requests = [TokenRequest(prompt=(START,), source=SourceFeatures(a), max_tokens=NUM_TOKENS) for a in arrays]
    for array, outputs in zip(arrays, engine.run(requests), strict=True):
        tokens = [START]
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                given = {"input_features": torch.tensor(array[None]), "decoder_input_ids": torch.tensor([tokens])}
                tokens.append(int(theirs(**given).logits[0, -1].argmax()))
        assert [one.token for one in outputs] == tokens[1:]
    assert engine.state().pages_used == 0
    with pytest.raises(InputError, match="reads features"):
        engine.check(TokenRequest(prompt=(START,), max_tokens=1))
