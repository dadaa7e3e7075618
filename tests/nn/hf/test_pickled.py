"""Files of pickled tensors are read without PyTorch, and nothing that they name is run."""

import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.hf.files import open_checkpoint
from meshwright.nn.hf.pickled import unpickled
from meshwright.nn.hf.weights import load_params
from tests.nn.families import LLAMA
from tests.nn.hf.test_weights import published, random_params, require_equal

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def of_tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def tensor(key: str, array: np.ndarray, *, offset: int = 0, size: int | None = None) -> bytes:
    """A call of the function that makes a tensor, as PyTorch pickles it."""
    numel = array.size if size is None else size
    storage = of_tuple(
        text("storage"), f"ctorch\n{STORAGES[array.dtype.name]}\n".encode(), text(key), text("cpu"), number(numel)
    )
    strides = [step // array.itemsize for step in array.strides]
    given = of_tuple(
        storage + b"Q",
        number(offset),
        of_tuple(*map(number, array.shape)),
        of_tuple(*map(number, strides)),
        b"\x89",
        b"ccollections\nOrderedDict\n)R",
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + given + b"R"


def write(path, arrays, *, more=b"", **changed):
    """A file of these arrays; ``more`` is the pickle of a further item, key and value."""
    items = b"".join(
        text(name) + tensor(str(key), array, **changed) for key, (name, array) in enumerate(arrays.items())
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02ccollections\nOrderedDict\n)R(" + items + more + b"u.")
        archive.writestr("archive/byteorder", b"little")
        for key, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return path


ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float16).reshape(2, 3).T,
    "c": np.arange(5).astype(ml_dtypes.bfloat16),
    "d": np.asarray([7, 8]),
}


def test_tensors_come_back(tmp_path):
    stored = {name: np.asarray(array) for name, array in ARRAYS.items()}
    stored["b"] = np.arange(6, dtype=np.float16).reshape(2, 3)
    found = unpickled(write(tmp_path / "pytorch_model.bin", stored))
    for name, array in stored.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_a_model_is_loaded_from_one_file_or_from_several_with_an_index(tmp_path):
    tensors = published(LLAMA)
    write(tmp_path / "pytorch_model.bin", tensors)
    require_equal(load_params(LLAMA, tmp_path), random_params(LLAMA))
    (tmp_path / "pytorch_model.bin").unlink()
    parts = [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    weight_map = {name: f"p{number}.bin" for number, part in enumerate(parts) for name in part}
    for number, part in enumerate(parts):
        write(tmp_path / f"p{number}.bin", part)
    index = str({"weight_map": weight_map}).replace("'", '"')
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    require_equal(load_params(LLAMA, tmp_path), random_params(LLAMA))


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("posix.system", b"cposix\nsystem\n" + of_tuple(text("touch {ran}")) + b"R"),
        ("builtins.eval", b"cbuiltins\neval\n" + of_tuple(text("open('{ran}', 'w')")) + b"R"),
        ("torch.load", b"ctorch\nload\n)R"),
        ("collections.Counter", b"ccollections\nCounter\n)R"),
        ("torch._utils._rebuild_tensor_v2.__globals__", b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n"),
    ],
)
def test_a_pickle_that_names_anything_else_is_refused_and_not_run(tmp_path, named, call):
    ran = tmp_path / "ran"
    file = write(tmp_path / "pytorch_model.bin", {}, more=text("x") + call.replace(b"{ran}", b"r"))
    with pytest.raises(InputError, match=f"names {named}, which is not read or run"):
        unpickled(file)
    assert not ran.exists()


def test_what_python_pickles_of_its_own_accord_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    file = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"w": Evil()}))
    with pytest.raises(InputError, match=r"names builtins\.print"):
        unpickled(file)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"offset": 1}, "is not within its storage"), ({"offset": -1}, "not within"), ({"size": 99}, "too short")],
)
def test_tensors_stay_inside_their_storage(tmp_path, changed, said):
    file = write(tmp_path / "pytorch_model.bin", {"a": ARRAYS["a"]}, **changed)
    with pytest.raises(InputError, match=said):
        unpickled(file)


def test_other_files_are_refused_in_one_line(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"from before PyTorch 1\.6\. Convert it with PyTorch: torch\.save"):
        unpickled(file)
    with pytest.raises(InputError, match="'lr' is not a tensor"):
        unpickled(write(file, {}, more=text("lr") + number(3)))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/text", b"")
    with pytest.raises(InputError, match=r"has no 'data\.pkl': it is damaged or not PyTorch's"):
        unpickled(file)
    whole = write(file, {"a": ARRAYS["a"]}).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut short"):
        unpickled(file)


@pytest.mark.parametrize("shape", [(4,), (3, 2)])
def test_one_tensor_is_no_dict_of_tensors(tmp_path, shape):
    array, file = np.zeros(shape, np.float32), tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + tensor("0", array) + b".")
        archive.writestr("archive/data/0", array.tobytes())
    with pytest.raises(InputError, match="holds ndarray, not a dict of tensors"):
        unpickled(file)


@pytest.mark.peer
def test_files_that_pytorch_writes(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    a = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": a, "turned": a.T, "part": a[1:, 2:], "b": a.bfloat16(), "h": a.half(), "p": torch.nn.Parameter(a)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as found:
        assert found.keys() == tensors.keys()
        for name, expected in tensors.items():
            np.testing.assert_array_equal(np.asarray(found[name], np.float32), expected.detach().float().numpy())
    module = torch.nn.Linear(3, 2)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as found:
        np.testing.assert_array_equal(found["weight"], module.weight.detach().numpy())
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="before PyTorch"), open_checkpoint(tmp_path):
        pass
