"""Golden kind ``help``: what every verb says with --help, and every option's name, default and type."""

from typing import Any

import click

from tests.golden import product
from tests.golden.environment import WIDTH
from tests.golden.files import Golden


def make() -> Golden:
    """The whole tree of verbs."""
    found: Golden = {}
    _walk(product.command_line(), ["meshwright"], found)
    return found


def _walk(command: click.Command, path: list[str], found: Golden) -> None:
    name = " ".join(path)
    context = click.Context(command, info_name=name, max_content_width=int(WIDTH), terminal_width=int(WIDTH))
    found[name] = {
        "help": command.get_help(context).splitlines(),
        "parameters": {str(parameter.name): _parameter(parameter) for parameter in command.params},
    }
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            child = command.get_command(context, verb)
            assert child is not None
            _walk(child, [*path, verb], found)


def _parameter(parameter: click.Parameter) -> dict[str, Any]:
    info = parameter.to_info_dict()
    default = info.get("default")
    return {
        "kind": info["param_type_name"],
        "opts": list(info["opts"]),
        "type": _words(info["type"]),
        "default": default if isinstance(default, bool | int | float | str | None) else repr(default),
        "required": info["required"],
        "nargs": info["nargs"],
        "multiple": info["multiple"],
        "is_flag": info.get("is_flag", False),
        "metavar": parameter.metavar,
    }


def _words(kind: dict[str, Any]) -> dict[str, Any]:
    """A click type as plain data: its name, and the choices or bounds that it has."""
    kept = ("name", "choices", "min", "max")
    return {key: list(kind[key]) if key == "choices" else kind[key] for key in kept if key in kind}
