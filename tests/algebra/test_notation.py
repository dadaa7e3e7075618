"""The notation: what is printed is read back, blocks are measured, and nonsense is refused with its reason."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.algebra.blocks import bytes_per_device, bytes_total, local_shape
from meshwright.algebra.notation import ShardedArray, local_elements, parse_array
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.cli.fields import dim_sizes, parse_mesh
from meshwright.core.errors import InputError
from meshwright.core.notation import parse_axes

AXES = ("X", "Y", "Z1", "DP", "data", "fsdp", "tensor", "my_axis", "a2")
DIMS = ("B", "D", "D'", "T2", "Batch", "h")


@st.composite
def arrays(draw):
    dims = draw(st.lists(st.sampled_from(DIMS), unique=True, max_size=4))
    axes = [[] for _ in (*dims, "unreduced", "unused")]
    for axis in draw(st.permutations(AXES)):
        axes[draw(st.integers(0, len(dims) + 1))].append(axis)
    placed = [tuple(a) for a in axes]
    name = draw(st.sampled_from(("A", "dW_out", "In", "Tmp'", "x1")))
    return ShardedArray(name, tuple(dims), tuple(placed[: len(dims)]), placed[len(dims)])


@settings(max_examples=200, deadline=None)
@given(arrays())
def test_what_is_printed_is_read_back(array):
    assert parse_array(str(array)) == array


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("X", ("X",)),
        ("XY", ("X", "Y")),
        ("X1Y2", ("X1", "Y2")),
        ("tensor", ("tensor",)),
        ("{data, fsdp}", ("data", "fsdp")),
        ("{DP}", ("DP",)),
    ],
)
def test_subscripts(text, axes):
    assert parse_axes(text) == axes


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("A[I_X,J]", "A[I_X, J]"),
        ("  A [ I_XY , J ] { U_Z }  ", "A[I_XY, J]{U_Z}"),
        ("W[D_{fsdp,context},F_tensor]{U_data}", "W[D_{fsdp,context}, F_tensor]{U_data}"),
        ("dW[F,D]{U_{data,fsdp}}", "dW[F, D]{U_{data,fsdp}}"),
        ("loss[]", "loss[]"),
        ("[B,D]", "A[B, D]"),
        ("A[B_{DP}]", "A[B_{DP}]"),
    ],
)
def test_printing(text, printed):
    assert str(parse_array(text)) == printed


def test_a_dtype_may_stand_for_the_name():
    array = parse_array("int8[D, F_Y]")
    assert (array.dtype, array.axes_of("F"), array.axes_of("D")) == ("int8", ("Y",), ())


def test_where_axes_are():
    array = parse_array("W[D_XY, F_Z]")
    assert array.spread == ("X", "Y", "Z")
    assert (array.dim_on("Y"), array.dim_on("Z"), array.dim_on("W")) == ("D", "F", None)
    assert array.axes_of("B") == ()
    assert str(array.resharded({"D": ("X",), "B": ("Y",)}, unreduced=("Y",))) == "W[D_X, F_Z]{U_Y}"


@pytest.mark.parametrize(
    "text",
    [
        "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]",
        "In[B_X, D_Y]·Win[D_X, F_Y] → Tmp[B_X, F_Y]",
        "In[B_X,D_Y] @ Win[D_X,F_Y] -> Tmp[B_X,F_Y]",
        "In[B_X,D_Y] . Win[D_X,F_Y] -> Tmp[B_X,F_Y]",
    ],
)
def test_a_product_is_read(text):
    assert [str(a) for a in parse_einsum(text)] == ["In[B_X, D_Y]", "Win[D_X, F_Y]", "Tmp[B_X, F_Y]"]


def test_a_product_of_unreduced_arrays_is_read():
    lhs, rhs, out = parse_einsum("A[I,J]{U_{data,fsdp}} * B[J,K]{U_X} -> C[I,K]{U_X}")
    assert (lhs.unreduced, rhs.unreduced, out.unreduced) == (("data", "fsdp"), ("X",), ("X",))


def test_arrays_named_by_their_dtype_or_alike_get_names():
    arrays = parse_einsum("bf16[B,D] * int8[D,F] -> bf16[B,F]")
    assert [a.name for a in arrays] == ["A", "B", "C"]
    assert [a.dtype for a in arrays] == ["bf16", "int8", "bf16"]
    assert [a.name for a in parse_einsum("[I,J] * [J,K] -> [I,K]")] == ["A", "B", "C"]


# How to Scale Your Model, section 3.1: a quiz and figure 7; the last has two copies over Z.
@pytest.mark.parametrize(
    ("text", "dims", "mesh", "shape", "total_bytes"),
    [
        ("A[I_X,J_Y]", {"I": 4, "J": 128}, {"X": 2, "Y": 2}, (2, 64), 512),
        ("A[I_X,J]", {"I": 4, "J": 128}, {"X": 2, "Y": 2}, (2, 128), 1024),
        ("A[I_XY,J]", {"I": 128, "J": 2048}, {"X": 2, "Y": 8, "Z": 2}, (8, 2048), 524288),
    ],
)
def test_local_shape_and_bytes(text, dims, mesh, shape, total_bytes):
    array = parse_array(text)
    assert local_shape(array, dims, mesh) == shape
    assert local_elements(array, dims, mesh) == math.prod(shape)
    assert bytes_per_device(array, dims, mesh, element_bytes=1) == math.prod(shape)
    assert bytes_total(array, dims, mesh, element_bytes=1) == total_bytes
    assert bytes_total(array, dims, mesh, element_bytes=0.5) == total_bytes / 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A[I_X, J_X]", "uses mesh axis X for I and J; an axis can split one dim of an array once"),
        ("A[I_{X,X}]", "uses mesh axis X for I twice"),
        ("A[I_X]{U_X}", "split over X along I and unreduced over it"),
        ("A[I]{U_XX}", "unreduced over XX; name each axis once"),
        ("A[I, I]", "names a dim twice"),
        ("A[I", "'A[I' is not a sharded array. Write for example A[I_X, J]"),
        ("A[I]]", "is not a sharded array"),
        ("A(I, J)", "is not a sharded array"),
        ("A[[I]]", "is not a sharded array"),
        ("A[I] B", "is not a sharded array"),
        ("", "is not a sharded array"),
        ("A[I,]", "'' in 'A[I,]' is no dim. Write D, D_X, D_XY, D_{fsdp,tensor}"),
        ("A[I_]", "'I_' in 'A[I_]' is no dim"),
        ("A[3]", "'3' in 'A[3]' is no dim"),
        ("A[I J]", "'I J' in 'A[I J]' is no dim"),
        ("A[I_{}]", "'{}' does not name mesh axes. Write X, XY, tensor or {data,fsdp}"),
        ("A[I_{X,}]", "does not name mesh axes"),
        ("A[I_{X Y}]", "does not name mesh axes"),
        ("A[I]{U_}", "does not name mesh axes"),
    ],
)
def test_an_array_that_makes_no_sense_is_refused(text, reason):
    with pytest.raises(InputError) as refused:
        parse_array(text)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A[I,J] * B[J,K]", "is not one product. Write A[I,J] * B[J,K] -> C[I,K]"),
        ("A[I,J] -> B[I,J] -> C[I,J]", "is not one product"),
        ("A[I,J] -> C[I]", "is not a product of two arrays"),
        ("A[I,J] * B[J,K] -> C[I,L]", "dim L of C[I, L] is in neither A[I, J] nor B[J, K]"),
        ("A[I,J] * B[J_X,K_X] -> C[I,K]", "uses mesh axis X for J and K"),
        ("hello", "is not one product"),
    ],
)
def test_a_product_that_makes_no_sense_is_refused(text, reason):
    with pytest.raises(InputError) as refused:
        parse_einsum(text)
    assert reason in str(refused.value)


def test_sizes_are_read_in_order():
    assert list(parse_mesh("X=4, Y=2").items()) == [("X", 4), ("Y", 2)]
    assert dim_sizes("B=1Ki,D=4096") == {"B": 1024, "D": 4096}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a mesh axis size. Write X=4,Y=2"),
        ("X", "'X' is not a mesh axis size. Write X=4,Y=2"),
        ("=4", "'=4' is not a mesh axis size"),
        ("X=0", "size of mesh axis X '0' is below 1"),
        ("X=2,X=4", "X is given twice"),
        ("X=many", "size of mesh axis X"),
    ],
)
def test_mesh_sizes_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(InputError) as refused:
        parse_mesh(text)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("dims", "mesh", "reason"),
    [
        ({"B": 6}, {"fsdp": 4}, "B=6 of x[B_fsdp] does not divide by fsdp=4. Use a B that is a multiple of 4"),
        ({"B": 8}, {"fspd": 4}, "uses mesh axis fsdp, which the mesh lacks. Did you mean 'fspd'?"),
        ({"D": 8}, {"fsdp": 4}, "dim B of x[B_fsdp] has no size. Give it with --dims B=..."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(dims, mesh, reason):
    with pytest.raises(InputError) as refused:
        local_shape(parse_array("x[B_fsdp]"), dims, mesh)
    assert reason in str(refused.value)
