"""What is to be compiled: one step of one plan for one target. Plain data, handed from process to process."""

from typing import Any, Literal

import msgspec

from meshwright.algebra.generation import Storage
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import AS_RUN, Assumptions, Strategy
from meshwright.verify.targets import Target

StepKind = Literal["train", "prefill", "decode", "generate"]
"""Steps as they are asked for: "generate" is another word for "decode"."""
Depth = Literal["lower", "partition", "full"]

REQUEST, LOWERED, COMPILED, MODULE, ERROR = (
    "request.json",
    "lowered.json",
    "compiled.json",
    "module.hlo",
    "error.json",
)
"""Files of the folder in which a request is compiled."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a strategy.

    ``seq_len`` is the tokens of a sequence; to generate, the positions that the cache holds. ``settings`` are those of
    a training run where they differ from the defaults, and ``options`` what they ask of the program; ``weights`` and
    ``cache_dtype`` are of prefill and generation. ``order`` are the numbers of the chips in the order of the mesh.
    """

    model: Model
    cluster: Cluster
    strategy: Strategy
    assumptions: Assumptions = AS_RUN
    target: Target
    step: StepKind = "train"
    batch_seqs: int
    seq_len: int
    depth: Depth = "partition"
    weights: Literal["as they are", "int8"] = "as they are"
    cache_dtype: str = "bf16"
    settings: dict[str, Any] = {}
    options: ProgramOptions = PLAIN
    optimizer: str = "adamw"
    order: tuple[int, ...] = ()

    @property
    def job(self) -> Job:
        """The job of which the step is one."""
        kind = "decode" if self.step == "generate" else self.step
        return Job(kind=kind, batch_seqs=self.batch_seqs, seq_len=self.seq_len, optimizer=self.optimizer)

    @property
    def storage(self) -> Storage:
        """How the step stores weights and caches."""
        return Storage(cache_dtype=self.cache_dtype, quantised=self.weights == "int8")  # type: ignore[arg-type]


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """The step has been traced, every array divides and every type agrees. ``seconds`` are of the wall."""

    seconds: float


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


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What compiling shows: ``seconds`` of the wall; ``out_of_memory`` is what the compiler says of a program that is
    too large.
    """

    seconds: float
    memory: Memory
    out_of_memory: str = ""
