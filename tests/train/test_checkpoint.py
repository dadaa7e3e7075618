"""Checkpoints: whole or absent, kept by policy, laid out anew on any mesh, copies of buffers that go on changing."""

import gc
import json
import re
import resource
import shutil
import subprocess
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.core.digests import SUMS
from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.mesh import device_mesh
from meshwright.train.checkpoint import Checkpoints, Position, describe_arrays


class State(NamedTuple):
    params: Any
    opt_state: Any


SPEC = {"w": PartitionSpec(None, "a", "b"), "norm": PartitionSpec()}
SHAPES = {"w": (4, 8, 16), "norm": (4, 8)}


def shardings(**axes: int) -> State:
    mesh = device_mesh(axes)
    named = {name: NamedSharding(mesh, spec) for name, spec in SPEC.items()}
    return State(named, (NamedSharding(mesh, PartitionSpec()), {"mu": named}))


def numbers() -> State:
    def draw(start: float) -> dict[str, jax.Array]:
        sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
        return {n: start + jnp.arange(size, dtype=jnp.float32).reshape(SHAPES[n]) for n, size in sizes.items()}

    return State(draw(0), (jnp.asarray(7, jnp.int32), {"mu": draw(1000)}))


def placed(**axes: int) -> State:
    return jax.device_put(numbers(), shardings(**axes))


def shapes() -> State:
    return jax.eval_shape(numbers)


def at(step: int, **changes: Any) -> Position:
    return Position(step=step, samples=8 * step, tokens=256 * step, **changes)


def same(found: State, wanted: State) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, wanted)


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path) as kept:
        kept.save(placed(a=4, b=2), at(3, model={"d_model": 8}, settings={"steps": 9}))
    return tmp_path


@pytest.mark.parametrize("axes", [{"a": 4, "b": 2}, {"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 8}])
def test_what_comes_back_lies_as_the_new_mesh_says(saved, axes):
    with Checkpoints(saved) as kept:
        found = kept.restore(shapes(), shardings(**axes))
        assert kept.position() == at(3, model={"d_model": 8}, settings={"steps": 9})
    same(found, numbers())
    assert jax.tree.map(lambda a: a.sharding, found) == shardings(**axes)


def test_the_step_after_a_save_may_reuse_the_memory(tmp_path):
    move = jax.jit(partial(jax.tree.map, lambda a: a + 1), donate_argnums=0)
    state = placed(a=4, b=2)
    with Checkpoints(tmp_path) as kept:
        for step in range(1, 4):
            state = move(state)
            kept.save(state, at(step))
        for _ in range(20):  # while the last one is being written
            state = move(state)
        kept.wait()
        found = kept.restore(shapes(), shardings(a=2, b=1))
    same(found, jax.tree.map(lambda a: a + 3, numbers()))


def test_the_newest_and_every_so_manieth_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as kept:
        assert kept.position() is None
        for step in range(1, 8):
            kept.save(placed(a=1, b=1), at(step))
        kept.wait()
        assert kept.steps() == [4, 6, 7]
        kept.save(placed(a=1, b=1), at(7))
        assert kept.steps() == [4, 6, 7]
    with Checkpoints(tmp_path) as again:
        assert again.position() == at(7)


def test_what_was_never_finished_is_not_there_and_goes(saved):
    """A process that dies while it writes leaves a folder of another name, in its first moments an empty one."""
    left = saved / "checkpoints" / "4.orbax-checkpoint-tmp"
    (left / "state").mkdir(parents=True)
    with Checkpoints(saved) as kept:
        assert kept.steps() == [3]
        kept.save(placed(a=1, b=1), at(4))
        kept.wait()
        assert kept.steps() == [3, 4]
    assert not left.exists()


def test_other_arrays_are_refused_in_one_line(saved):
    wanted = shapes()
    narrow = State({**wanted.params, "w": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}, wanted.opt_state)
    more = State({**wanted.params, "bias": jax.ShapeDtypeStruct((4,), jnp.float32)}, wanted.opt_state)
    with Checkpoints(saved) as kept:
        with pytest.raises(
            InputError, match=r"has float32\[4,8,16\] as params\['w'\].*needs float32\[4,8,8\]"
        ) as caught:
            kept.restore(narrow, None)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError, match=r"has nothing as params\['bias'\].*needs float32\[4\]"):
            kept.restore(more, None)


def cut_short(folder):
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def largest(folder):
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


DAMAGES = {
    "position cut": lambda newest: (newest / "position" / "metadata").write_text('{"position": {"st'),
    "position of nothing": lambda newest: (newest / "position" / "metadata").write_text(
        '{"position": {"step": 4}, "arrays": {}}'
    ),
    "array cut": lambda newest: cut_short(newest / "state" / "d"),
    "no arrays": lambda newest: shutil.rmtree(newest / "state"),
}
SILENT = {
    "a bit of an array": lambda newest: flip(largest(newest / "state" / "d")),
    "a bit of the position": lambda newest: flip(newest / "position" / "metadata"),
    "a bit of a digest": lambda newest: flip(newest / SUMS),
    "the files of another step": lambda newest: shutil.copytree(
        newest.with_name("3") / "position", newest / "position", dirs_exist_ok=True
    ),
}
"""Damages that Orbax cannot see."""


@pytest.mark.parametrize("damage", (DAMAGES | SILENT).values(), ids=DAMAGES | SILENT)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(saved, damage):
    with Checkpoints(saved) as kept:
        kept.save(placed(a=1, b=1), at(4))
    newest = saved / "checkpoints" / "4"
    damage(newest)
    with Checkpoints(saved) as kept:
        assert kept.position() == at(3, model={"d_model": 8}, settings={"steps": 9})
        same(kept.restore(shapes(), shardings(a=1, b=1)), numbers())
        first, then = kept.passed_over
        assert re.match(r"checkpoint 4 is passed over and kept as 4\.damaged: .*checkpoints/4/", first)
        assert then == "going on from checkpoint 3"
        kept.save(placed(a=1, b=1), at(4))
    with Checkpoints(saved) as again:
        assert again.steps() == [3, 4]
        assert again.position() == at(4)


def test_checkpoints_whose_folders_were_swapped_are_named_as_such(saved):
    with Checkpoints(saved) as kept:
        kept.save(placed(a=1, b=1), at(4))
    folder = saved / "checkpoints"
    for before, after in (("4", "x"), ("3", "4"), ("x", "3")):
        (folder / before).rename(folder / after)
    with Checkpoints(saved) as kept, pytest.raises(CannotRunError) as caught:
        kept.position()
    assert str(caught.value) == f"{folder}/4 holds the checkpoint of step 3. Give each folder the name of its step."


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(saved):
    flip(largest(saved / "checkpoints" / "3" / "state" / "d"))
    with (
        Checkpoints(saved) as kept,
        pytest.raises(CannotRunError, match=r"no checkpoint in .* is whole: .* Start"),
    ):
        kept.position()
    assert (saved / "checkpoints" / "3").is_dir()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
# Orbax lets go of the reads of a step's other arrays, which may end after the loop that waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_of_a_checkpoint_without_digests_is_named_in_one_line(saved, damage):
    with Checkpoints(saved) as kept:
        kept.save(placed(a=1, b=1), at(4))
    newest = saved / "checkpoints" / "4"
    (newest / SUMS).unlink()
    damage(newest)
    with (
        Checkpoints(saved, trust=True) as kept,
        pytest.raises(CannotRunError, match=r"checkpoints/4 is damaged: .") as caught,
    ):
        kept.restore(shapes(), shardings(a=1, b=1))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Remove that folder to go on from step 3.")
    time.sleep(0.3)  # so that they end in here
    gc.collect()


def test_a_checkpoint_without_digests_is_read_only_if_it_is_trusted(saved):
    """Versions of before wrote none, and who damages files may remove their digests."""
    (saved / "checkpoints" / "3" / SUMS).unlink()
    with Checkpoints(saved) as kept, pytest.raises(CannotRunError, match=r"3 has no SHA256SUMS: .* --set train\.trust"):
        kept.position()
    with Checkpoints(saved, trust=True) as kept:
        same(kept.restore(shapes(), shardings(a=1, b=1)), numbers())
        assert kept.passed_over == ["checkpoint 3 has no SHA256SUMS: whether it is whole is not known"]


def test_the_checkpoint_before_one_without_digests_is_taken(saved):
    with Checkpoints(saved) as kept:
        kept.save(placed(a=1, b=1), at(4))
    (saved / "checkpoints" / "4" / SUMS).unlink()
    with Checkpoints(saved) as kept:
        assert kept.position().step == 3
        assert "checkpoint 4 is passed over and kept as 4.damaged: " in kept.passed_over[0]
        assert kept.passed_over[1:] == ["going on from checkpoint 3"]


def test_digests_are_what_sha256sum_checks(saved):
    folder = saved / "checkpoints" / "3"
    done = subprocess.run(["sha256sum", "-c", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = {line.partition(":")[0] for line in done.stdout.splitlines()}
    there = {str(path.relative_to(folder)) for part in ("state", "position") for path in (folder / part).rglob("*")}
    assert {name for name in there if (folder / name).is_file()} == named


def test_a_disk_that_takes_no_more_is_said_in_one_line(saved):
    noise = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = Checkpoints(saved)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        kept.save(State({"w": jnp.asarray(noise)}, ()), at(4))
        with pytest.raises(CannotRunError, match=r"no checkpoint can be written in .*: File too large") as caught:
            kept.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        kept.close()
    assert "\n" not in str(caught.value)
    with Checkpoints(saved) as again:
        assert again.steps() == [3]


def test_layers_are_stored_in_the_order_of_the_model(tmp_path):
    order = np.array([2, 0, 3, 1])  # how a strategy holds layers

    def held(named):
        return {name: array[order] for name, array in named.items()}

    def canonical(named):
        return {name: array[np.argsort(order)] for name, array in named.items()}

    state = numbers()
    here = State(held(state.params), (state.opt_state[0], {"mu": held(state.opt_state[1]["mu"])}))
    with Checkpoints(tmp_path) as kept:
        kept.save(here, at(1), to_canonical=canonical)
        kept.wait()
        same(kept.restore(shapes(), shardings(a=1, b=1)), state)
        same(kept.restore(shapes(), shardings(a=1, b=1), from_canonical=held), here)


def test_what_is_stored_beside_the_arrays_is_readable(saved):
    (file,) = (saved / "checkpoints" / "3" / "position").glob("metadata")
    stored = json.loads(file.read_text())
    assert stored["position"]["samples"] == 24
    assert stored["arrays"] == describe_arrays(numbers())
    assert stored["arrays"][".params['w']"] == "float32[4,8,16]"


def test_the_newer_of_checkpoints_and_states_on_this_machine_is_taken(tmp_path):
    near = str(tmp_path / "memory")
    with Checkpoints(tmp_path / "run", near=near) as store:
        store.save(placed(a=4, b=2), at(2))
        store.wait()
        store.near.save(placed(a=4, b=2), at(3))
        store.wait()
    with Checkpoints(tmp_path / "run", near=near) as store:
        assert store.position().step == 3
        same(store.restore(shapes(), shardings(a=4, b=2)), numbers())
        assert "from the state of step 3" in store.passed_over[-1]
        folder = store.near.folder
    shutil.copytree(tmp_path / "run" / "checkpoints" / "2", tmp_path / "whole")
    flip(largest(tmp_path / "run" / "checkpoints" / "2"))
    with Checkpoints(tmp_path / "run", near=near) as store:
        assert store.position().step == 3, "no checkpoint is whole"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    shutil.move(tmp_path / "whole", tmp_path / "run" / "checkpoints" / "2")
    flip(largest(folder / "3"))
    with Checkpoints(tmp_path / "run", near=near) as store:
        assert store.position().step == 2, "what was damaged there is passed over"
        store.save(placed(a=4, b=2), at(4))
        store.wait()
        assert store.position().step == 4
        store.forget_near()
    assert not any((tmp_path / "memory").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]


def test_a_lost_memory_is_begun_anew(tmp_path):
    with Checkpoints(tmp_path / "run", near=str(tmp_path / "memory")) as store:
        store.near.save(placed(a=4, b=2), at(3))
    shutil.rmtree(tmp_path / "memory")
    with Checkpoints(tmp_path / "run", near=str(tmp_path / "memory")) as store:
        assert store.position() is None
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"local_folder=.*file cannot be used"):
        Checkpoints(tmp_path / "other", near=str(tmp_path / "file"))


def test_a_machine_that_takes_no_more_states_ends_no_run(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path / "run", near=str(tmp_path / "memory")) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            store.save_near(placed(a=4, b=2), at(3))
            store._wait_near()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.near_fault.startswith(f"no checkpoint can be written in {tmp_path / 'memory'}")
        store.save(placed(a=4, b=2), at(4))
        store.wait()
        store.save_near(placed(a=4, b=2), at(4))
        assert not store.near.steps(), "a checkpoint has it"
        for step in (5, 6):  # the fault is said once more
            store.save_near(placed(a=4, b=2), at(step))
            store.wait()
        assert (store.near.steps(), store.position().step) == ([6], 6), store.near_fault
