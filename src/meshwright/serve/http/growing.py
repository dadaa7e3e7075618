"""One sequence of an answer: its tokens become text, up to a stop string."""

from typing import Literal

from meshwright.serve.http.asked import AskedText
from meshwright.serve.model_folder import TextStream
from meshwright.serve.request import TokenLogprob, TokenOutput
from meshwright.serve.stop_strings import StopScan
from meshwright.serve.token_times import TokenTimes

FinishReason = Literal["stop", "length"]
ReportedToken = tuple[int, TokenLogprob | None]
"""A token that is reported, with its log-probability; a prompt's first token has none."""


class GrowingText:
    """A sequence while it grows. ``piece`` and ``entries`` are text and reported tokens that are not taken yet;
    ``finish`` is why it ended, None before. ``num_tokens`` were made, the one that ended it too."""

    def __init__(self, asked: AskedText, index: int) -> None:
        request = asked.requests[index]
        self.index = index
        self.times = TokenTimes()
        self.finish: FinishReason | None = None
        self.piece = "" if asked.echoes is None else asked.echoes[index // asked.n]
        self.entries = list[ReportedToken]()
        self.offset = 0
        self.cached = self.num_tokens = 0
        self.started = False
        self.prompt = request.prompt
        self._min_tokens, self._max_tokens = request.min_tokens, request.max_tokens
        self._reports, self._echoes = asked.logprobs, asked.logprobs and asked.echoes is not None
        self._stream = TextStream(asked.text, request.prompt[-8:])  # a stream looks no further back
        self._scan = StopScan(asked.stops)

    def push(self, output: TokenOutput) -> bool:
        """Adds an output. Returns True if a stop string ended the text before the engine ended the sequence."""
        if not self.started:
            self.started, self.cached = True, output.cached
            if self._echoes:
                self.entries.append((self.prompt[0], None))
                self.entries += ((one.token, one) for one in output.prompt)
        text = ""
        self.num_tokens += output.token is not None or (output.finish == "stop" and self._max_tokens > 0)
        if output.token is not None:
            text = self._stream.push(output.token)
            if self._reports:
                self.entries.append((output.token, output.logprob))
        if output.finish is not None:
            text += self._stream.finish()
        stopped = False
        if text:
            if self.times.num_tokens < self._min_tokens:
                self.piece += text
            else:
                certain, stopped = self._scan.push(text)
                self.piece += certain
        if output.finish is not None:
            self.finish = "stop" if stopped or output.finish == "stop" else "length"
            if not stopped:
                self.piece += self._scan.finish()
            return False
        if stopped:
            self.finish = "stop"
        return stopped

    def take(self) -> tuple[str, list[ReportedToken]]:
        """Returns the text and the reported tokens since the last call."""
        piece, self.piece = self.piece, ""
        entries, self.entries = self.entries, []
        return piece, entries
