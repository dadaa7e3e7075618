"""Presents several engines of one model as a single engine (data parallel serving)."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from meshwright.serve.engine import Engine
from meshwright.serve.request import EngineState, TokenEngine, TokenOutput, TokenRequest


class EngineGroup(TokenEngine):
    """Engines of one model on separate devices, used as one engine.

    A request goes to an engine with a free slot if there is one; among these to the engine with most of its prompt
    cached, then with the fewest requests. Request r of engine i of n has the group's number r * n + i.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines, self.max_len, self.vocab_size = tuple(engines), engines[0].max_len, engines[0].vocab_size
        limits, num_engines = engines[0].limits, len(engines)
        self.limits = msgspec.structs.replace(
            limits, max_requests=num_engines * limits.max_requests, num_pages=num_engines * limits.num_pages
        )
        self.bounds, self.check, self._sums = engines[0].bounds, engines[0].check, engines[0].times.sums
        for engine in engines:
            engine.times.sums = self._sums

    def submit(self, request: TokenRequest) -> int:
        """Queues a request at an engine and returns its group number. Raises InputError if it could never run."""
        engine_index = min(range(len(self.engines)), key=lambda engine_index: self.engines[engine_index].order(request))
        return self.engines[engine_index].submit(request) * len(self.engines) + engine_index

    def cancel(self, number: int) -> None:
        """Ends a request of this group at once, see `Engine.cancel`."""
        own_request_number, engine_index = divmod(number, len(self.engines))
        self.engines[engine_index].cancel(own_request_number)

    def step(self) -> list[TokenOutput]:
        """Dispatches a step of every engine with work, and returns the outputs of their previous steps."""
        busy_engines = [(engine_index, engine) for engine_index, engine in enumerate(self.engines) if engine.has_work]
        for _, engine in busy_engines:
            engine.dispatch()  # all devices have work before the host waits for tokens
        return [
            msgspec.structs.replace(output, number=output.number * len(self.engines) + engine_index)
            for engine_index, engine in busy_engines
            for output in engine.read()
        ]

    @property
    def has_work(self) -> bool:
        """True while any engine has work."""
        return any(engine.has_work for engine in self.engines)

    def state(self) -> EngineState:
        """Returns the sum of all engines' states."""
        # the engines share one `sums`, which counts all of them
        *field_names, _ = EngineState.__struct_fields__
        states = [msgspec.structs.astuple(engine.state())[:-1] for engine in self.engines]
        return EngineState(**dict(zip(field_names, np.sum(states, axis=0).tolist(), strict=True)), sums=self._sums)

    def warm_up(
        self,
        on_shape: Callable[[int, int], None] = lambda num_done, num_shapes: None,
        requests: Sequence[TokenRequest] = (),
        *,
        first_only: bool = False,
    ) -> None:
        """Compiles the shapes of every engine, see `Engine.warm_up`; ``on_shape`` counts shapes of all engines."""
        longest_requests = sorted(requests, key=lambda r: -len(r.prompt))[: -(-len(requests) // len(self.engines))]
        for engine_index, engine in enumerate(self.engines):

            def tell(num_done: int, num_shapes: int, num_before: int = engine_index) -> None:
                on_shape(num_before * num_shapes + num_done, len(self.engines) * num_shapes)

            engine.warm_up(tell, longest_requests, first_only=first_only)
