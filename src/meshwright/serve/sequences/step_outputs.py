"""Reads the tokens that a step has drawn into the outputs of its requests."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.serve.drawing.drawer import Drawn
from meshwright.serve.drawing.grammar import MaskedRow
from meshwright.serve.request import Finish, TokenOutput
from meshwright.serve.sequences.live import Live
from meshwright.serve.sequences.step_rows import OutputOf


class ReadOutputs(NamedTuple):
    """The outputs of a step in row order, the requests that they finish, and the number of accepted drafts by request
    number (no entry: none)."""

    outputs: list[TokenOutput]
    ended: list[Live]
    accepted: dict[int, int]


def masked_rows(expected: Sequence[OutputOf | None]) -> list[MaskedRow]:
    """Returns the first drawing row of each open request with a grammar; its ``drafts`` stand for the rows after it."""
    drawing_rows, previous_seq = list[MaskedRow](), None
    for row_index, output in enumerate(expected):
        seq = output and output.live
        if output and seq and seq.answer and output.row.target < 0 and seq is not previous_seq and not seq.is_closed:
            drawing_rows.append(MaskedRow(row_index, seq.answer, seq.drafts))
        previous_seq = seq
    return drawing_rows


def read_outputs(expected: Sequence[OutputOf | None], drawn: Drawn) -> ReadOutputs:
    """Appends the drawn tokens to their requests and returns the outputs. Skips rows of finished requests and rows
    after a rejected draft; rows that score a prompt token add its log-probability."""
    results = ReadOutputs([], [], {})
    wrong_draft_requests = set[int]()
    for row_index, output in enumerate(expected):
        if output is None or output.live.is_closed or output.live.number in wrong_draft_requests:
            continue
        seq, (_, _, target_token), draft_token = output
        request, token = seq.request, int(drawn.token[row_index])
        if target_token >= 0:
            seq.prompt_logprobs.append(drawn.logprob_of(row_index, target_token, request.logprobs or 0))
            continue
        has_token, finish = _ending(seq, token)
        if has_token:
            seq.tokens.append(token)
        has_logprob = has_token and request.logprobs is not None
        results.outputs.append(
            TokenOutput(
                number=seq.number,
                token=token if has_token else None,
                logprob=drawn.logprob_of(row_index, token, request.logprobs or 0) if has_logprob else None,
                prompt=tuple(seq.prompt_logprobs),
                finish=finish,
                cached=seq.num_hit,
                admitted_s=seq.admitted_s,
            )
        )
        seq.prompt_logprobs, seq.num_hit = [], 0
        if finish is not None:
            seq.is_closed = True  # at once: its later rows, here and in the next step, are skipped
            results.ended.append(seq)
        elif draft_token is not None and draft_token == token:
            results.accepted[seq.number] = results.accepted.get(seq.number, 0) + 1
        elif draft_token is not None:
            wrong_draft_requests.add(seq.number)
    return results


def _ending(seq: Live, token: int) -> tuple[bool, Finish | None]:
    """Returns whether a drawn token belongs to the output, and why the output ends with it (None: it goes on)."""
    request, num_drawn = seq.request, len(seq.tokens) - len(seq.request.prompt)
    has_token = request.max_tokens > 0
    if seq.answer is not None and seq.answer.is_error():
        return False, "length"  # the grammar hit its limits, so the answer is incomplete
    if token in request.stop_tokens and num_drawn >= request.min_tokens:
        return False, "stop"
    if seq.answer is not None and has_token and not seq.answer.consume_token(token):
        return False, "length"
    if seq.answer is not None and seq.answer.is_stopped():
        return has_token, "stop"
    return has_token, "length" if num_drawn + has_token >= request.max_tokens else None
