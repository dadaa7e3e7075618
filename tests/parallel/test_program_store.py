"""Programs in files: read again if they are whole and this user's, compiled again if not."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from meshwright.parallel.generation.program_store import ProgramStore

folder, found = Path(sys.argv[1]), {}

def use(name, about="a"):
    store = ProgramStore(folder, about)
    there = store.has(["double"])
    program = store.get("double", lambda: jax.jit(lambda x: 2 * x).lower(jnp.zeros(3)))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    found[name] = [there, store.num_loaded, store.num_compiled]

use("first")
use("again")
(path,) = folder.rglob("*.program")
path.write_bytes(path.read_bytes()[:-1])
use("damaged")
use("mended")
path.write_bytes(b"")
use("empty")
path.chmod(0o666)
use("everyone writes")
path.parent.chmod(0o777)
use("everyone adds")
use("other", "b")
print(json.dumps(found))
"""


def test_a_program_is_read_if_it_can_be_trusted(tmp_path):
    """In a process of one device without JAX's own cache, as a server is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "XLA_FLAGS"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "first": [False, 0, 1],
        "again": [True, 1, 0],
        "damaged": [True, 0, 1],
        "mended": [True, 1, 0],
        "empty": [True, 0, 1],
        "everyone writes": [False, 0, 1],
        "everyone adds": [False, 0, 1],
        "other": [False, 0, 1],
    }
