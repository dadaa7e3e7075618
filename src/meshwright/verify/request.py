"""Request to compile one step of a plan for one target: plain data, sent from process to process as JSON."""

from typing import Any, Literal

import msgspec

from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.cost.setting import Setting
from meshwright.spec.strategy import Form, Strategy
from meshwright.verify.targets import Target

AskedStep = Literal["train", "prefill", "decode", "generate"]
"""Step names on the command line; "generate" is a synonym of "decode"."""
Depth = Literal["lower", "partition", "full"]

REQUEST, LOWERED, MEMORY, MODULE, ERROR = "request.json", "lowered", "memory.json", "module.hlo", "error.json"
OPTIONS = "options.json"
"""Names of files in the folder in which a request is compiled."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to compile: one step of the setting's job under ``strategy``, for ``target``, as far as ``depth``.

    ``step`` is the name that the user typed. ``settings`` are a training run's settings that differ from the defaults,
    and ``options`` the program options that follow from them. ``order`` lists the chip numbers in mesh order; empty for
    the compiler's order."""

    setting: Setting
    strategy: Strategy
    target: Target
    step: AskedStep = "train"
    depth: Depth = "partition"
    form: Form = "shard_map"
    settings: dict[str, Any] = {}
    options: ProgramOptions = PLAIN
    order: tuple[int, ...] = ()


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device as the compiler assigned them.

    ``outputs`` are results that do not reuse an argument's buffer. ``peak`` is the largest sum of live bytes, if the
    compiler reports it.
    """

    arguments: int
    temporaries: int
    outputs: int
    peak: int | None = None

    @property
    def needed(self) -> int:
        """Bytes that the program occupies: arguments, temporaries and outputs."""
        return self.arguments + self.temporaries + self.outputs
