"""vLLM's `bench serve`, from the Python files of its wheel: of the rest of vLLM it is given empty stand-ins.

python tests/clients/vllm_bench.py FOLDER --unpack WHEEL       the files that are needed, into FOLDER
python tests/clients/vllm_bench.py FOLDER [options of bench serve]
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

REAL = ("vllm.benchmarks", "vllm.utils")


class StandIn(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns(MetaPathFinder, Loader):
    """Finds stand-ins for the modules of vLLM outside of `REAL`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        own = name.partition(".")[0] == "vllm" and not name.startswith(REAL)
        return ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandIn(spec.name)
        module.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, _: ModuleType) -> None:
        pass


def unpack(wheel: str, folder: Path) -> None:
    """Unpacks the files of `REAL`."""
    with ZipFile(wheel) as file:
        wanted = tuple(name.replace(".", "/") + "/" for name in REAL)
        file.extractall(folder, [one for one in file.namelist() if one.startswith(wanted) and one.endswith(".py")])


def bench(folder: Path, given: list[str]) -> None:
    """Runs the client."""
    import logging

    import transformers

    sys.meta_path.insert(0, StandIns(folder))
    import vllm.logger
    import vllm.tokenizers

    vllm.logger.init_logger = logging.getLogger
    vllm.tokenizers.get_tokenizer = lambda name, **_: transformers.AutoTokenizer.from_pretrained(name)
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(given))


if __name__ == "__main__":
    if sys.argv[2:3] == ["--unpack"]:
        unpack(sys.argv[3], Path(sys.argv[1]))
    else:
        bench(Path(sys.argv[1]), sys.argv[2:])
