"""Measures speculative decoding: equal prompts with several numbers of drafts."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.cost.formulas.serving import expected_tokens
from meshwright.serve.engine import Engine
from meshwright.serve.group import EngineGroup
from meshwright.serve.request import TokenRequest


class DraftResult(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement with ``num_drafts`` drafts a step: tokens a second; seconds of a step, drafting included; the share
    of drafts that were accepted, NaN without drafts; and tokens per step of a request."""

    num_drafts: int
    tokens_per_s: float
    step_s: float
    accepted: float
    step_tokens: float


def measure_drafts(engine: Engine | EngineGroup, requests: Sequence[TokenRequest]) -> DraftResult:
    """Times requests to completion, after an untimed run that leaves their prompts in the prefix cache."""
    engine.run(requests)
    state_before, started_s = engine.state(), time.perf_counter()
    outputs_by_request = engine.run(requests)
    run_s, state_after = time.perf_counter() - started_s, engine.state()
    num_tokens = sum(output.token is not None for request_outputs in outputs_by_request for output in request_outputs)
    num_drafted, num_accepted = state_after.drafted - state_before.drafted, state_after.accepted - state_before.accepted
    return DraftResult(
        num_drafts=engine.limits.num_drafts,
        tokens_per_s=num_tokens / run_s,
        step_s=run_s / (state_after.steps - state_before.steps),
        accepted=num_accepted / num_drafted if num_drafted else np.nan,
        step_tokens=num_tokens / max(num_tokens - num_accepted, 1),
    )


def predicted_speedups(results: Sequence[DraftResult]) -> list[float]:
    """Returns the predicted speedup of each result over the first, which is without drafts: tokens of a step by
    `expected_tokens`, with the acceptance that explains the second result, times the measured ratio of step seconds."""
    acceptances, plain_step_s, draft_result = np.linspace(0, 1, 1001), results[0].step_s, results[1]
    acceptance = np.interp(draft_result.step_tokens, expected_tokens(acceptances, draft_result.num_drafts), acceptances)
    return [float(expected_tokens(acceptance, result.num_drafts)) * plain_step_s / result.step_s for result in results]
