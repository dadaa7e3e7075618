"""Stopping a run from outside: Ctrl-C or SIGTERM ends it after a step that all processes agree on."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax

from meshwright.parallel.processes import stop_is_agreed


class StopRequest:
    """Whether somebody wants the run to stop; ``asked`` is of this process, the others may not know yet."""

    def __init__(self) -> None:
        self.many = jax.process_count() > 1
        self.asked = False

    def ask(self) -> None:
        """Stop after the step in progress, or after the first step that all processes can agree on."""
        if self.many and not self.asked:
            # JAX listens for this signal, and finds the step at which no process is behind another.
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True

    def stops_after(self, step: int) -> bool:
        """Whether the run ends with this step. Every process asks once a step, in order."""
        return stop_is_agreed(step) if self.many else self.asked


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """The first Ctrl-C or SIGTERM asks the loop to stop: an interrupted step would lose its state. A second Ctrl-C
    raises KeyboardInterrupt where the program is."""
    request = StopRequest()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if request.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not request.asked:
            say("stopping after this step; Ctrl-C again stops at once")
        request.ask()

    # With many processes SIGTERM stays with JAX.
    wanted = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM)
    before = {}
    try:
        for number in wanted:
            before[number] = signal.signal(number, on_signal)
    except ValueError:  # only the main thread may set handlers; elsewhere Ctrl-C is not ours to handle
        pass
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
