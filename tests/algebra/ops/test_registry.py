"""Every op is one file in `algebra.ops` and one of the same name in `nn.ops`, and both state the same steps."""

from meshwright.algebra.ops import op_kind, op_names, step_kinds
from meshwright.core.dims import COLLECTIVES
from meshwright.nn import ops as functions


def files_of(package):
    import pkgutil

    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def test_both_folders_have_the_same_files():
    assert set(op_names()) == files_of(functions)


def test_both_folders_state_the_same_steps():
    assert step_kinds().keys() == functions.local_steps().keys()
    assert not step_kinds().keys() & set(COLLECTIVES)


def test_every_step_belongs_to_one_op():
    names = [name for op in op_names() for name in op_kind(op).steps]
    assert len(names) == len(set(names))
