"""`meshwright compile`: the programs of a server, compiled ahead of its start."""

from meshwright.cli.engine import EngineGiven, open_given, prepare_devices, say_all
from meshwright.cli.verb import verb
from meshwright.core.errors import CannotRunError
from meshwright.core.files import cache_folder
from meshwright.core.units import counted


class Given(EngineGiven):
    pass


@verb(Given, needs="run")
def command(given: Given) -> None:
    """Compile every program that serving the model of a FOLDER needs, so that serve starts at once.

    Give the same options as to serve: the programs depend on them, on the devices and on the versions of JAX and XLA.
    """
    prepare_devices(given.on, given.axes)
    from meshwright.parallel.generation.program_store import ProgramStore

    if ProgramStore(cache_folder(), None).folder is None:
        raise CannotRunError(
            "compiled programs cannot be kept for several CPU devices, or while JAX keeps them itself. Use one device, "
            "and unset JAX_COMPILATION_CACHE_DIR."
        )
    opened_engine = open_given(given, in_background=False)
    stores = [engine.packed.programs for engine in opened_engine.engine.engines]
    num_new, num_loaded = (sum(getattr(store, name) for store in stores) for name in ("num_compiled", "num_loaded"))
    folders_text = ", ".join(str(store.folder) for store in stores)
    say_all([f"{counted(num_new, 'program')} of steps and samplers compiled, {num_loaded:,} were in {folders_text}"])
