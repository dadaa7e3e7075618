"""The packages of each extra, `pip install 'meshwright[EXTRA]'`, and the error if one of them is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from meshwright.core.errors import InputError

_RUN = ("jax", "jaxtyping", "optax", "orbax", "grain", "safetensors", "tokenizers", "jinja2", "scipy")
EXTRAS = {
    "draw": ("altair", "vl_convert"),
    "run": _RUN,
    "serve": (*_RUN, "starlette", "uvicorn", "httptools", "llguidance", "prometheus_client"),
    "gguf": ("gguf",),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
}
"""Extra of `pyproject.toml` -> the modules that are imported from its packages."""


def lacking(extra: str) -> str:
    """Returns the name of the first package of an extra that is not installed; "" if all are."""
    name = next((name for name in EXTRAS[extra] if find_spec(name) is None), "")
    return "JAX" if name == "jax" else name


def require(extra: str, user: str) -> None:
    """Raises InputError if a package of an extra is not installed; ``user`` is the verb or function that needs it."""
    if name := lacking(extra):
        raise InputError(f"{user} needs {name}: pip install 'meshwright[{extra}]'")


@contextmanager
def extras_named(user: str) -> Iterator[None]:
    """Turns a failed import of an extra's package inside the block into an InputError that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        for extra, names in EXTRAS.items():
            if (error.name or "").partition(".")[0] in names:
                require(extra, user)
        raise
