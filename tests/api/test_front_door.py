"""`import meshwright as mw`: its names, that planning loads no JAX, and the page that shows them."""

import ast
import doctest
import importlib
import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from tests.cli.made_rates import write_rates

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
STUB = ROOT / "src" / "meshwright" / "__init__.pyi"


@pytest.mark.parametrize("name", mw.__all__)
def test_every_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(mw, name))
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_type_checkers_see_the_same_names():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == mw._HOME


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        mw.plam  # noqa: B018


def test_planning_loads_no_jax():
    program = (
        "import sys, meshwright as mw;"
        "setting = mw.make_setting('llama3-8b', 'v5e:4x4', batch='64seq', seq_len=4096);"
        "mw.explain(mw.rank_plans(setting, axes={'fsdp': 16}, top=1).plans[0]);"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_model_may_be_a_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}')
    setting = mw.make_setting(path, "v5e:4x4", batch="64seq", seq_len=64)
    assert setting == mw.make_setting(str(path), "v5e:4x4", batch="64seq", seq_len=64)
    assert mw.derive(path).num_layers == 1


def test_the_page_says_what_happens(tmp_path, monkeypatch):
    write_rates(tmp_path).rename(tmp_path / "examples.toml")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(PAGE.read_text(encoding="utf-8"), {}, "api.md", str(PAGE), 0)
    said: list[str] = []
    assert len(test.examples) > 20
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append).failed == 0, "".join(said)


def test_the_tour_runs(capsys):
    runpy.run_path(str(ROOT / "docs" / "tour.py"))
    said = capsys.readouterr().out
    assert said.count("MFU") == 3
    assert "reduce_scatter" in said.lower().replace("reducescatter", "reduce_scatter")
    assert "times the memory" in said


FORMULAS = (*("accounting", "anatomy", "failures", "limits", "limit_table", "roofline", "serving", "training_budget"),)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_page_names_every_formula(name):
    module = importlib.import_module(f"meshwright.cost.formulas.{name}")
    own = (one for one, what in vars(module).items() if getattr(what, "__module__", "") == module.__name__)
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |"))
    assert {one for one in own if one[0] != "_" and f"`{one}`" not in row} == set()


def test_no_module_of_formulas_is_left_out():
    folder = ROOT / "src" / "meshwright" / "cost" / "formulas"
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(FORMULAS)
