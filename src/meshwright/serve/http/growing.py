"""Collects the text and reported tokens of one sequence of an answer, up to a stop string."""

import codecs

from meshwright.serve.http.asked import AskedText
from meshwright.serve.model_folder import TextStream
from meshwright.serve.request import Finish, TokenLogprob, TokenOutput
from meshwright.serve.stop_strings import StopScan
from meshwright.serve.token_times import TokenTimes

ReportedToken = tuple[int, TokenLogprob | None]
"""A reported token with its log-probability; None for the first token of a prompt."""


class GrowingText:
    """A sequence while it grows. ``piece`` and ``entries`` are text and reported tokens since the last `take`;
    ``finish`` is why it ended (None: it has not). ``num_tokens`` counts generated tokens, a stop token too;
    ``at_start``: no placed token has added text yet."""

    def __init__(self, asked: AskedText, index: int) -> None:
        request, body = asked.requests[index], asked.body
        self.index = index
        self.times = TokenTimes()
        self.finish: Finish | None = None
        self.piece = "" if asked.echoes is None else asked.echoes[index // asked.n]
        self.entries = list[ReportedToken]()
        self.cached = self.num_tokens = 0
        self.started = False
        self.prompt = request.prompt
        self._min_tokens, self._max_tokens = request.min_tokens, request.max_tokens
        self.reports = request.logprobs is not None
        self._echoes = self.reports and asked.echoes is not None
        self._special, self._skips_special = asked.served.special, body.skip_special_tokens is not False
        text_decoder = asked.served.text_of(body.skip_special_tokens)
        # a stream looks no further back; an answer does not continue what an encoder reads
        context = () if asked.is_from_source else request.prompt[-8:]
        self._stream = TextStream(text_decoder, context)
        stop_strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._scan = StopScan(stop_strings, keep=bool(body.include_stop_str_in_output or body.no_stop_trim))
        self._echo, self._placed, self._offset = self.piece, 0, 0
        # a token may be part of a character, which counts once complete
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.at_start = self._echoes or (self._skips_special and all(token in self._special for token in context))

    def push(self, output: TokenOutput) -> bool:
        """Adds an output. Returns True if a stop string ended the text before the engine ended the sequence."""
        if not self.started:
            self.started, self.cached = True, output.cached
            if self._echoes:
                self.entries.append((self.prompt[0], None))
                self.entries += ((token_logprob.token, token_logprob) for token_logprob in output.prompt)
        text = special_text = ""
        # a stop token counts too, as in vLLM
        self.num_tokens += output.token is not None or (output.finish == "stop" and self._max_tokens > 0)
        if output.token is not None:
            text = self._stream.push(output.token)
            special_text = self._special.get(output.token, "") if self._skips_special else ""
            if self.reports:
                self.entries.append((output.token, output.logprob))
        if output.finish is not None:
            text += self._stream.finish()
        is_stopped = False
        if self.times.num_tokens < self._min_tokens:
            self.piece += text
        elif text or special_text:
            certain_text, is_stopped = self._scan.push(text)
            if special_text and not is_stopped:
                # a stop string may contain a special token that the text leaves out
                rest_text, is_stopped = self._scan.push(special_text, hidden=True)
                certain_text += rest_text
            self.piece += certain_text
        if output.finish is not None:
            self.finish = "stop" if is_stopped or output.finish == "stop" else "length"
            if not is_stopped:
                self.piece += self._scan.finish()
            return False
        if is_stopped:
            self.finish = "stop"
        return is_stopped

    def place(self, token: int, raw: bytes) -> int:
        """Returns the offset of the next reported token in the text, in complete characters, and advances it by the
        token's bytes ``raw``; special tokens that the text leaves out have no width."""
        offset, token_text = self._offset, self._special.get(token)
        is_echo = self._echoes and self._placed < len(self.prompt)
        self._placed += 1
        if token_text is None or (self._echo.startswith(token_text, offset) if is_echo else not self._skips_special):
            self._offset += len(self._utf8.decode(raw))
            self.at_start = False
        return offset

    def take(self) -> tuple[str, list[ReportedToken]]:
        """Returns the text and the reported tokens since the last call."""
        piece, self.piece = self.piece, ""
        reported_tokens, self.entries = self.entries, []
        return piece, reported_tokens
