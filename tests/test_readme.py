"""The console blocks of the README print what they say."""

import re
import shlex
from pathlib import Path

import pytest

from meshwright.cli.main import run

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ (.+?)\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_console_blocks():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[c.split()[1] for c, _ in BLOCKS])
def test_console_block(command, output, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(command)
    assert name == "meshwright"
    assert run(arguments) == 0
    assert capsys.readouterr().out.rstrip("\n") == output.rstrip("\n")
