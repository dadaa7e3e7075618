"""The functions that give the worked answers are those that the verbs of the command line use."""

from meshwright.cli.main import VERBS
from tests.oracles.reach import SOURCE, modules, reachable
from tests.oracles.test_coverage import TABLES
from tests.oracles.worked import called, row


def called_by_tables() -> set[tuple[str, str]]:
    """Every function of the package that some answer calls itself; a class stands for what it does when made.

    The import of a module is no function: whether an answer sees it depends on what ran before.
    """
    found = set()
    for table in TABLES.values():
        for identity, answer in table.items():
            for one in called(answer, row(identity).inputs):
                name = one.name.split(".__")[0].split(".<")[0]
                if name != "<module>":
                    found.add((one.module, name))
    return found


def test_verbs_use_the_functions_of_the_answers():
    assert {module for module, *_ in VERBS.values()} <= modules().keys()
    unused = called_by_tables() - reachable()
    assert not unused, "no verb uses " + ", ".join(sorted(f"{module}.{name}" for module, name in unused))


def test_what_no_verb_uses_is_found():
    assert ("meshwright.algebra.einsum", "einsum_steps") in reachable()
    assert reachable("meshwright.cli.output") < reachable()
    assert (SOURCE / "cli" / "main.py").exists()
    assert ("meshwright.algebra.einsum", "einsum_steps") not in reachable("meshwright.cli.output")
