"""What is to be compiled: one step of one plan for one target. Plain data, handed from process to process."""

from typing import Any, Literal

import msgspec

from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.cost.setting import Setting
from meshwright.spec.strategy import Strategy
from meshwright.verify.targets import Target

AskedStep = Literal["train", "prefill", "decode", "generate"]
"""Steps as they are asked for: "generate" is another word for "decode"."""
Depth = Literal["lower", "partition", "full"]

REQUEST, LOWERED, MEMORY, MODULE, ERROR = "request.json", "lowered", "memory.json", "module.hlo", "error.json"
"""Files of the folder in which a request is compiled."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a strategy: that of the setting's job, under the name by which it was asked for.

    ``settings`` are those of a training run where they differ from the defaults, and ``options`` what they ask of the
    program. ``order`` are the numbers of the chips in the order of the mesh.
    """

    setting: Setting
    strategy: Strategy
    target: Target
    step: AskedStep = "train"
    depth: Depth = "partition"
    settings: dict[str, Any] = {}
    options: ProgramOptions = PLAIN
    order: tuple[int, ...] = ()


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device as the compiler assigned them.

    ``arguments`` are what the step is given, ``temporaries`` what it needs besides, ``outputs`` results that do not
    take the place of an argument. ``peak`` is the most that is alive at once, where the compiler says so.
    """

    arguments: int
    temporaries: int
    outputs: int
    peak: int | None = None

    @property
    def needed(self) -> int:
        """What the program fills: arguments, temporaries and new results."""
        return self.arguments + self.temporaries + self.outputs
