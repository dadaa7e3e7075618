"""The process that compiles for `verify`: ``python -m meshwright.api.compiling FOLDER``."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import UserError
from meshwright.core.files import write_json_whole
from meshwright.cost.setting import Setting
from meshwright.spec.strategy import Form, Strategy
from meshwright.verify.request import ERROR, REQUEST, Request


def main(folder: Path) -> int:
    """Compiles the request in the folder. Returns the exit code: 0, or 1 after an error, written to ``error.json``."""
    from meshwright.verify.compiling import compile_request

    try:
        request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
        compile_request(request, folder, _step)
    except Exception as error:
        kind = "plan" if isinstance(error, UserError) else type(error).__name__
        write_json_whole(folder / ERROR, {"kind": kind, "message": str(error)})
        return 1
    return 0


def _step(request: Request, mesh: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the real step of a request and the sizes of its inputs."""
    job = request.setting.job
    step = step_of(request.setting, request.strategy, request.settings, mesh=mesh, form=request.form)
    return step, (job.batch_seqs, job.seq_len) if job.trains else (job.seq_len if job.kind == "prefill" else 0,)


def step_of(
    setting: Setting, strategy: Strategy, settings: Mapping[str, Any], *, mesh: Any = None, form: Form = "shard_map"
) -> Any:
    """Returns the step that `train` runs with these settings, or the one of `generate`; by default on the devices at
    hand. Raises InputError if a training batch does not divide over them."""
    job = setting.job
    if job.trains:
        from meshwright.train.settings import settings_from_table
        from meshwright.train.step import make_step, require_divides

        table = settings_from_table(settings)
        step = make_step(setting.model, strategy, table, several_documents=False, mesh=mesh, form=form)
        require_divides(step, job)
        return step
    from meshwright.parallel.generation.generate_step import GenerateStep

    cache_dtype, weights = setting.storage.executed
    return GenerateStep(
        setting.model,
        strategy,
        max_len=job.seq_len,
        batch_seqs=job.batch_seqs,
        cache_dtype=cache_dtype,
        weights=weights,
        mesh=mesh,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
