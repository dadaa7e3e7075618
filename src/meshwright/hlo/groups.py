"""Replica groups of collectives, in all the forms in which XLA writes them, and the mesh axes that they span."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Groups = tuple[NDArray[np.int64], ...]
"""Device numbers, one array [groups, members] for each size of group."""

_EXPLICIT = re.compile(r"replica_groups=\{(\{[0-9,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{}]*)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_REORDERED = re.compile(r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[0-9,{} ]*\})\}")
_SLICES = re.compile(r'_xla_megascale_target="\{([0-9,]+)\}x\{(\d+):(\d+)\}"')
_DEVICES = re.compile(r'_xla_megascale_target="?\{(\{[0-9,{} >-]*\})\}')
_SLICE_STRIDE = 100_000


def replica_groups(text: str, num_devices: int) -> Groups:
    """Parses the groups in an instruction's attributes; without groups all devices form one.

    Numbers index the devices of the mesh row-major. Raises ValueError for an unknown form.
    """
    if explicit_match := _EXPLICIT.search(text):
        return _lists(explicit_match[1])
    if iota_match := _IOTA.search(text):
        shape, source_shape, dim_order = (_ints(part) for part in iota_match.groups())
        return (_transposed(source_shape, dim_order).reshape(shape),)
    if named_match := _NAMED.search(text):
        return (_named_groups(named_match[1], named_match[2], named_match[3]),)
    if "replica_groups=" in text and "replica_groups={}" not in text:
        raise ValueError(f"replica groups in a form that is not known: {text[text.index('replica_groups') :][:120]}")
    return (np.arange(num_devices).reshape(1, -1),)


def permute_pairs(text: str) -> Groups:
    """Returns the (source, target) pairs of a collective-permute; () if the text has none."""
    match = _PAIRS.search(text)
    return _lists(match[1]) if match else ()


def slice_groups(text: str) -> Groups:
    """Parses the groups of a transfer between slices; returned devices are numbered slice by slice.

    XLA counts slices from 1: ``{1,2}x{0:3}`` groups each of four devices with the device of the same number in the
    other slice; in a list of devices, or of sends such as ``{100003->200003}``, 200003 is device 3 of slice 2. Empty if
    the text names no target.
    """
    if range_match := _SLICES.search(text):
        slice_numbers, slice_size = np.array(_ints(range_match[1])), int(range_match[3]) + 1
        members = (slice_numbers - 1)[None, :] * slice_size + np.arange(int(range_match[2]), slice_size)[:, None]
        return (members,)
    list_match = _DEVICES.search(text)
    if list_match is None:
        return ()
    groups = _lists(list_match[1])
    num_in_slice = max(int((group % _SLICE_STRIDE).max()) for group in groups) + 1
    return tuple((group // _SLICE_STRIDE - 1) * num_in_slice + group % _SLICE_STRIDE for group in groups)


def group_size(groups: Groups) -> int:
    """Returns the size of the largest group; 1 if there is none."""
    return max((block.shape[1] for block in groups), default=1)


def are_shifted(groups: Groups, mesh: Mapping[str, int]) -> bool:
    """True if the groups are one group shifted over the mesh, as groups along axes are, or if there is no mesh."""
    if not mesh or len(groups) != 1:
        return len(groups) < 2
    coordinates = np.array(np.unravel_index(np.sort(groups[0], axis=1), tuple(mesh.values())))
    shifts = coordinates - coordinates[:, :, :1]
    return bool((shifts == shifts[:, :1]).all())


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of a group differ.

    Raises ValueError where a device number is not in the mesh.
    """
    if not mesh:
        return ()
    shape = tuple(mesh.values())
    differs_by_axis = np.zeros(len(shape), bool)
    for group_array in groups:
        coordinates = np.array(np.unravel_index(group_array, shape))
        differs_by_axis |= (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, differs in zip(mesh, differs_by_axis, strict=True) if differs)


@lru_cache(maxsize=256)
def _lists(text: str) -> Groups:
    """Parses ``{0,1},{2,3}`` into one array for each size of group."""
    groups_by_size: dict[int, list[NDArray[np.int64]]] = {}
    for group_text in re.findall(r"\{([^{}]*)\}", text):
        members = np.array([int(n) for n in group_text.replace("->", ",").split(",") if n.strip()], np.int64)
        if members.size:
            groups_by_size.setdefault(members.size, []).append(members)
    return tuple(np.stack(groups) for groups in groups_by_size.values())


def _ints(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()] if text else []


def _transposed(shape: list[int], order: list[int]) -> NDArray[np.int64]:
    if (num_devices := math.prod(shape)) > 10**8:
        raise ValueError(f"replica groups of {num_devices:.0e} devices; at most 1e+08 are read.")
    device_numbers = np.arange(num_devices).reshape(shape)
    return device_numbers.transpose(order) if order else device_numbers


def _named_groups(mesh: str, devices: str | None, axes: str) -> NDArray[np.int64]:
    """Parses groups over named axes of an explicit mesh: ``'data'=2,'tensor'=4`` and ``'tensor'``.

    ``devices`` are the mesh's device numbers if they are not row-major: a list, or ``[4,2]T(1,0)``. A group may span
    part of an axis: ``'tensor':(2)2`` is the minor half of a tensor axis of 4, split into 2 x 2.
    """
    size_of = {(name, "whole"): int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    device_ids = _mesh_devices(devices, math.prod(size_of.values()))
    group_keys = []
    for name, _, before, size in _AXIS.findall(axes):
        if before:
            size_of = _split(size_of, name, int(before), int(size))
        group_keys.append((name, "part" if before else "whole"))
    axis_numbers = [list(size_of).index(key) for key in group_keys]
    device_ids = np.moveaxis(device_ids.reshape(tuple(size_of.values())), axis_numbers, range(-len(axis_numbers), 0))
    return device_ids.reshape(-1, math.prod(device_ids.shape[len(size_of) - len(axis_numbers) :]))


def _split(dims: Mapping[tuple[str, str], int], name: str, before: int, size: int) -> dict[tuple[str, str], int]:
    """Splits a mesh axis into three, of which the group spans the middle one. Raises ValueError if it cannot."""
    axis_size = dims.get((name, "whole"), 0)
    if not axis_size or axis_size % (before * size):
        raise ValueError(f"replica groups in a form that is not known: {name!r}:({before}){size} of {dict(dims)}")
    part_sizes = {(name, "before"): before, (name, "part"): size, (name, "after"): axis_size // (before * size)}
    new_dims: dict[tuple[str, str], int] = {}
    for key, old_size in dims.items():
        new_dims |= part_sizes if key == (name, "whole") else {key: old_size}
    return new_dims


def _mesh_devices(devices: str | None, count: int) -> NDArray[np.int64]:
    device_numbers = np.arange(count)
    if devices and (reordered_match := _REORDERED.fullmatch(devices.strip())):
        device_numbers = _transposed(_ints(reordered_match[1]), _ints(reordered_match[2])).reshape(-1)
    elif devices:
        device_numbers = np.array(_ints(devices) if re.fullmatch(r"[0-9, ]+", devices) else [])
    if device_numbers.size != count:
        raise ValueError(f"replica groups in a form that is not known: device_ids=({devices}) for {count} devices")
    return device_numbers
