"""Stops a run on Ctrl-C or SIGTERM, after a step that all processes agree on."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax

from meshwright.parallel.processes import stop_is_agreed


class StopRequest:
    """A request to stop the run; ``asked`` is True once this process got it, also before other processes know."""

    def __init__(self) -> None:
        self.many = jax.process_count() > 1
        self.asked = self._is_agreed = False

    def ask(self) -> None:
        """Asks to stop after the current step, or after the first step that all processes can agree on."""
        if self.many and not self.asked:
            # JAX handles this signal and finds a step that no process has passed.
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True

    def stops_after(self, step: int) -> bool:
        """True if the run ends with this step, or an earlier one. Every process calls it once a step, in order."""
        self._is_agreed = self._is_agreed or (stop_is_agreed(step) if self.many else self.asked)
        return self._is_agreed


@contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Makes the first Ctrl-C, SIGTERM or SIGHUP a request to stop, since an interrupted step would lose its state.

    A second one ends the process at once: Ctrl-C raises KeyboardInterrupt, signal n exits with 128 + n.
    """
    request = StopRequest()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if request.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if request.asked:
            # No clean-up: that would wait for a checkpoint that is being written.
            os._exit(128 + signum)
        say("stopping after this step; a second signal stops at once")
        request.ask()

    # With several processes JAX handles SIGTERM. A signal that is ignored, as nohup does with SIGHUP, stays so.
    signals = {signal.SIGINT, signal.SIGHUP} | ({signal.SIGTERM} if jax.process_count() == 1 else set())
    old_handlers = {}
    try:
        for signal_number in signals:
            if signal.getsignal(signal_number) != signal.SIG_IGN:
                old_handlers[signal_number] = signal.signal(signal_number, on_signal)
    except ValueError:  # only the main thread may set handlers; elsewhere the caller handles Ctrl-C
        pass
    try:
        yield request
    finally:
        for signal_number, old_handler in old_handlers.items():
            signal.signal(signal_number, old_handler)
