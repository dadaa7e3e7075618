"""What a step has drawn for its requests, once the host reads it."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.serve.drawing.drawer import Drawn
from meshwright.serve.drawing.grammar import MaskedRow
from meshwright.serve.request import Finish, TokenOutput
from meshwright.serve.sequences.live import Live
from meshwright.serve.sequences.step_rows import OutputOf


class ReadOutputs(NamedTuple):
    """The outputs of a step in the order of its rows, the requests that end by them, and how many drafts of requests
    were right, by number."""

    outputs: list[TokenOutput]
    ended: list[Live]
    accepted: dict[int, int]


def masked_rows(expected: Sequence[OutputOf | None]) -> list[MaskedRow]:
    """Returns the rows that draw by a grammar: of a request with drafts the first, whose mask the others follow."""
    masked, previous = list[MaskedRow](), None
    for row, output in enumerate(expected):
        live = output and output.live
        if output and live and live.answer and output.row.target < 0 and live is not previous and not live.is_closed:
            masked.append(MaskedRow(row, live.answer, live.drafts))
        previous = live
    return masked


def read_outputs(expected: Sequence[OutputOf | None], drawn: Drawn) -> ReadOutputs:
    """Returns what rows have drawn, and adds the tokens to their requests. Rows of requests that have ended, and those
    behind a wrong draft, are dropped."""
    results = ReadOutputs([], [], {})
    wrong_numbers = set[int]()
    for row, output in enumerate(expected):
        if output is None or output.live.is_closed or output.live.number in wrong_numbers:
            continue
        live, (_, _, target), draft = output
        request, token = live.request, int(drawn.token[row])
        if target >= 0:
            live.prompt_logprobs.append(drawn.logprob_of(row, target, request.logprobs or 0))
            continue
        has_token, finish = _ending(live, token)
        if has_token:
            live.tokens.append(token)
        has_logprob = has_token and request.logprobs is not None
        results.outputs.append(
            TokenOutput(
                number=live.number,
                token=token if has_token else None,
                logprob=drawn.logprob_of(row, token, request.logprobs or 0) if has_logprob else None,
                prompt=tuple(live.prompt_logprobs),
                finish=finish,
                cached=live.num_hit,
                admitted_s=live.admitted_s,
            )
        )
        live.prompt_logprobs, live.num_hit = [], 0
        if finish is not None:
            live.is_closed = True  # at once: its later rows, here and in the next step, are dropped
            results.ended.append(live)
        elif draft is not None and draft == token:
            results.accepted[live.number] = results.accepted.get(live.number, 0) + 1
        elif draft is not None:
            wrong_numbers.add(live.number)
    return results


def _ending(live: Live, token: int) -> tuple[bool, Finish | None]:
    """Returns whether a request's output has a token that was drawn, and whether and why it ends there."""
    request, num_before = live.request, len(live.tokens) - len(live.request.prompt)
    has_token = request.max_tokens > 0
    if live.answer is not None and live.answer.is_error():
        return False, "length"  # the limits of masks are reached: the answer is the beginning of one
    if token in request.stop_tokens and num_before >= request.min_tokens:
        return False, "stop"
    if live.answer is not None and has_token and not live.answer.consume_token(token):
        return False, "length"
    if live.answer is not None and live.answer.is_stopped():
        return has_token, "stop"
    return has_token, "length" if num_before + has_token >= request.max_tokens else None
