"""What the parts of `on_gpu.sh` share: options, a clock, cases kept as they come, their last line, and contestants."""

import argparse
import datetime
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import msgspec

from meshwright.core.files import write_text_whole
from meshwright.nn.attention.platform import default_platform
from meshwright.spec import catalogue
from meshwright.spec.chip import Chip, chip
from meshwright.spec.model import Model

CHIPS = ("a100", "h100", "h200", "b200")
"""Chips of the catalogue whose name is a part of the device's; rates are the datasheet's."""
UNKNOWN = "h200"
"""The chip that predictions are for on other devices, which --tiny runs on."""


class Part:
    """A part: its cases, which are in ``<name>.json`` after each of them, and its goal."""

    def __init__(self, name: str, goal: str, about: str | None, *, more: Callable[[Any], None] | None = None) -> None:
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--tiny", action="store_true", help="toy sizes on any backend, to see that it runs")
        parser.add_argument("--seconds", type=float, default=600, help="starts no case after this time")
        parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
        if more:
            more(parser)
        self.name, self.goal, self.options = name, goal, parser.parse_args()
        self.tiny: bool = self.options.tiny
        self.cases: list[dict[str, Any]] = []
        self._began, self._stopped = time.monotonic(), False
        if default_platform() != "cuda" and not self.tiny:
            raise SystemExit(
                f"JAX runs on {default_platform()}: an NVIDIA GPU is needed, or --tiny to see the program run."
            )
        signal.signal(signal.SIGTERM, _stop)

    @property
    def left_s(self) -> float:
        """Seconds in which a case may start."""
        return -1.0 if self._stopped else float(self.options.seconds) - (time.monotonic() - self._began)

    def keep(self, text: str, **figures: Any) -> dict[str, Any]:
        """Prints a case, and writes all of them."""
        self.cases.append(figures)
        self._write()
        print(text, flush=True)
        return figures

    def each(self, cases: Iterable[Any], run: Callable[[Any], None]) -> None:
        """Runs the cases until the time is up; one that fails says so, and the others go on."""
        for case in cases:
            name = getattr(case, "name", case)
            if self.left_s < 0:
                self.keep(f"{name}: no time left", case=name, error="no time left")
                continue
            try:
                run(case)
            except _Stopped:
                self._stopped = True
                self.keep(f"{name}: stopped", case=name, error="stopped, or the part ran past its time")
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                self.keep(f"{name}: {why[:300]}", case=name, error=why)

    def close(self, figure: str, met: bool) -> None:
        """Prints the line of the part: what, figure, goal, met or not. Failed cases do not meet a goal."""
        failed = sum("error" in case for case in self.cases)
        verdict = "met" if met and self.cases and not failed else "not met"
        if self.tiny and self.name != "kernels":
            verdict = f"toy sizes, not judged{', but cases failed' if failed else ''}"
        words = f"{failed} of {len(self.cases)} cases failed, " if failed else ""
        self._write(figure=figure, verdict=verdict)
        print(f"{self.name}: {words}{figure}; goal: {self.goal}; {verdict}", flush=True)
        if self.tiny and failed:
            raise SystemExit(1)

    def _write(self, **more: Any) -> None:
        about = {"part": self.name, "date": datetime.date.today().isoformat(), "device": jax.devices()[0].device_kind}
        found = about | {"jax": jax.__version__, "tiny": self.tiny, "goal": self.goal, **more, "cases": self.cases}
        self.options.out.mkdir(parents=True, exist_ok=True)
        write_text_whole(self.options.out / f"{self.name}.json", json.dumps(found, indent=1) + "\n")


class _Stopped(BaseException):
    """By `timeout` or by Ctrl-C: no exception that a case may catch."""


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def this_chip() -> Chip:
    """The datasheet of the device, or of `UNKNOWN`."""
    kind = jax.devices()[0].device_kind.lower()
    return chip(next((name for name in CHIPS if name in kind), UNKNOWN))


def model_of(name: str, *, layers: int = 0, tiny: bool = False) -> Model:
    """A model of the catalogue, with fewer layers if asked; of toy widths with ``tiny``."""
    found = catalogue.load_model(name)
    layers = min(layers or found.num_layers, 2 if tiny else found.num_layers)
    narrow: dict[str, Any] = {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return msgspec.structs.replace(found, num_layers=layers, **(narrow | {"vocab_size": 512} if tiny else {}))


# -- contestants -------------------------------------------------------------------------------------------


def contestant(script: str, *arguments: str, most_s: float) -> dict[str, Any]:
    """The JSON that a script prints in a process of its own; its error if it failed or took too long."""
    if "torch" in arguments and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return {"error": "torch and transformers are not installed"}
    try:
        done = subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=max(most_s, 10), check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {most_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr.strip().splitlines() or ["no message"])[-1][:300]}


def torch_llama(model: Model, length: int) -> Any:
    """The model in transformers, in bf16 with fused attention, random weights on the GPU if there is one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.d_model, "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads, "head_dim": model.head_dim,
        "num_key_value_heads": model.num_kv_heads, "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": length, "attn_implementation": "sdpa",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(LlamaConfig(**sizes))
