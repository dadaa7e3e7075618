"""Real processes that find each other: for what one process with emulated devices cannot show."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.cli.verbs.launch import child_environment, free_port

ROOT = Path(__file__).parents[2]
LONGEST_S = 600

Variables = Callable[[int, int, int], Mapping[str, str]]
"""(index, count, port) -> what a launcher would set."""


def own_variables(index: int, count: int, port: int) -> Mapping[str, str]:
    """What `meshwright launch` sets."""
    return child_environment({}, index, count, port=port, devices=None)


def run_all(
    arguments: Sequence[str], *, count: int, variables: Variables = own_variables, devices: int = 1
) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each process of ``python arguments``."""
    port = free_port()
    flags = os.environ.get("XLA_FLAGS", "").replace("--xla_force_host_platform_device_count=8", "")
    children = []
    for index in range(count):
        env = {**os.environ, **variables(index, count, port), "PYTHONUNBUFFERED": "1"}
        env["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        command = [sys.executable, *arguments]
        pipe = subprocess.PIPE
        children.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [child.communicate(timeout=LONGEST_S) for child in children]
    except BaseException:
        for child in children:
            child.kill()
            child.communicate()
        raise
    return [(child.returncode, out, error) for child, (out, error) in zip(children, outputs, strict=True)]
