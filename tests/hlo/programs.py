"""Compiled programs that are kept as text; what made them is in tests/data/hlo/README.md."""

from pathlib import Path

from meshwright.hlo.module import Module, parse_module

DATA = Path(__file__).parents[1] / "data" / "hlo"


def module(name: str) -> Module:
    """One of the programs."""
    return parse_module((DATA / f"{name}.hlo").read_text())
