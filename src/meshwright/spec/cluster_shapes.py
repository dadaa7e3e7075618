"""The shapes in which chips can be wired; errors for other shapes name a valid one."""

import math

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.chip import Chip, catalogued

ClusterShape = tuple[int, ...]

TORUS_AXES = "xyzuvw"
SLICES = "slices"
"""Names of the links of a torus cluster: the physical axes, and the network between slices."""

MAX_HOST_DEVICES = 64
"""Limit of emulated devices on one machine; each costs threads and memory."""

MAX_CHIPS = 10_000_000
"""Limit of chips in a cluster, far above any: some searches count through the divisors."""

LEVEL_NAMES = ("domain", "nodes", "racks", "pods", "clusters")
"""Levels of a switched cluster, innermost first; its sizes count chips of a domain, nodes of a rack, racks of a pod."""


def torus_wraps(chip: Chip, shape: ClusterShape) -> tuple[bool, ...]:
    """Returns for each axis whether a slice of this shape has wraparound links on it. See ``Cluster.wraps``."""
    if chip.topology != "torus" or chip.wrap_multiple is None:
        return (False,) * len(shape)
    is_wrapped = [size > 1 and size % chip.wrap_multiple == 0 for size in shape]
    if chip.num_ici_axes == 3 and not all(is_wrapped):
        return (False,) * len(shape)
    return tuple(is_wrapped)


def can_twist(chip: Chip, shape: ClusterShape) -> bool:
    """True if the chip's optical switches can twist this torus: k x k x 2k or k x 2k x 2k of whole cubes.

    Source: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023).
    """
    if not chip.twists or len(shape) != 3 or not all(torus_wraps(chip, shape)):
        return False
    min_size, mid_size, max_size = sorted(shape)
    return max_size == 2 * min_size and mid_size in (min_size, max_size)


def is_offered(chip: Chip, shape: ClusterShape) -> bool:
    """True if slices of this shape, in any order of axes, are on offer, or if the chip's offer is not known."""
    target = catalogued(chip, "libtpu")
    is_cubes = chip.num_ici_axes == 3 and all(torus_wraps(chip, shape))
    return not target or not target.slices or is_cubes or times(tuple(sorted(shape))) in target.slices


def complete_shape(chip: Chip, shape: ClusterShape, num_slices: int) -> ClusterShape:
    """Returns the shape completed with sizes of 1. Raises InputError or CannotRunError if it cannot be wired."""
    cluster_text = f"cluster {f'{num_slices}*' * (num_slices != 1)}{chip.name}:{times(shape)}"
    if not shape or min(*shape, num_slices) < 1:
        raise InputError(f"{cluster_text} has a size below 1. Give positive whole numbers.")
    if num_slices * math.prod(shape) > MAX_CHIPS:
        raise InputError(f"{cluster_text} has more than {MAX_CHIPS:,} chips. Give a smaller one.")
    check_by_topology = {"torus": _torus_shape, "switched": _switched_shape, "host": _host_shape}
    return check_by_topology[chip.topology](chip, shape, num_slices)


def _torus_shape(chip: Chip, shape: ClusterShape, num_slices: int) -> ClusterShape:
    axes = chip.num_ici_axes or len(shape)
    name = f"{chip.name}:{times(shape)}"
    if len(shape) > axes:
        raise InputError(f"{name} has {len(shape)} torus axes; {chip.name} has {axes}. {_advice(chip, shape, axes)}")
    if len(shape) == 1 and shape[0] > 1 and axes > 1:
        raise InputError(f"{name} names one of the {axes} torus axes of {chip.name}. {_advice(chip, shape, axes)}")
    if not _in_pod(chip, shape) or math.prod(shape) > (chip.max_chips or MAX_CHIPS):
        pod_text = f"{chip.max_chips or MAX_CHIPS:,} chips{f', {times(chip.pod_shape)}' if chip.pod_shape else ''}"
        raise InputError(f"{name} is larger than a pod of {chip.name}, {pod_text}. {_advice(chip, shape, axes)}")
    if num_slices > 1 and chip.dcn_bytes_per_s is None:
        raise CannotRunError(f"{chip.name} has no known data-centre network between slices. Use one slice.")
    return shape + (1,) * (axes - len(shape))


def _switched_shape(chip: Chip, shape: ClusterShape, num_slices: int) -> ClusterShape:
    name, n_chips = f"{chip.name}:{times(shape)}", min(8, chip.domain_chips or 8)
    if num_slices > 1:
        raise InputError(
            f"{num_slices}*{name}: slices are for TPUs. Write domain x nodes: {chip.name}:{n_chips}x256; or "
            f"islands with the rate between them: {num_slices}*{name}@1Gbit/s."
        )
    if len(shape) > len(LEVEL_NAMES):
        raise InputError(
            f"{name} has {len(shape)} sizes; at most {len(LEVEL_NAMES)} are read."
            f" Write domain x nodes of a rack x racks of a pod x pods, such as {chip.name}:{n_chips}x2x192x8."
        )
    domain_chips, num_domains = shape[0], math.prod(shape[1:])
    max_domain = chip.domain_chips
    if max_domain is not None and domain_chips > max_domain:
        num_nodes = min(-(-domain_chips * num_domains // max_domain), MAX_CHIPS // max_domain)
        raise InputError(
            f"{name} asks for {domain_chips} chips in one domain; a domain of {chip.name} has at most {max_domain}."
            f" Write domain x nodes: {chip.name}:{max_domain}x{num_nodes}."
        )
    return shape if len(shape) > 1 else (domain_chips, 1)


def _host_shape(chip: Chip, shape: ClusterShape, num_slices: int) -> ClusterShape:
    if num_slices != 1:
        own_text = f"{num_slices}*{chip.name}:{times(shape)}"
        raise InputError(f"{own_text}: hosts are islands, and need the rate of a link: {own_text}@10Gbit/s.")
    if len(shape) != 1:
        raise InputError(f"{chip.name}:{times(shape)} has a shape. Give a number of devices, such as {chip.name}:8.")
    if shape[0] > MAX_HOST_DEVICES:
        raise InputError(
            f"{chip.name}:{shape[0]} asks for {shape[0]} emulated devices on one machine; "
            f"at most {MAX_HOST_DEVICES} run. Use {chip.name}:8."
        )
    return shape


def times(shape: ClusterShape) -> str:
    """Returns a shape as text: ``"16x20x28"``."""
    return "x".join(map(str, shape))


def _advice(chip: Chip, shape: ClusterShape, axes: int) -> str:
    """Returns a sentence with a cluster of as many chips as ``shape`` has or, if none can be wired, of a few more."""
    num_chips, max_chips = math.prod(shape), chip.max_chips or MAX_CHIPS
    cube_side = 4 if axes == 3 and max_chips % 64 == 0 else 1
    pod = chip.pod_shape or tuple(cube_side * size for size in balanced_shape(max_chips // cube_side**axes, axes))
    if num_chips <= max_chips:
        side = cube_side if num_chips > cube_side**axes else 1
        boxes = (balanced_shape(n, axes) for n in range(-(-num_chips // side**axes), max_chips // side**axes + 1))
        shapes = (tuple(side * size for size in box) for box in boxes)
        nearest_shape = next((option for option in shapes if _in_pod(chip, option) and is_offered(chip, option)), pod)
        return f"{math.prod(nearest_shape):,} chips are for example {chip.name}:{times(nearest_shape)}."
    if chip.dcn_bytes_per_s is None:
        return f"The largest slice is {chip.name}:{times(pod)}."
    num_slices = max(2, round(num_chips / math.prod(pod)))
    chips_text = f"{num_slices * math.prod(pod):,} chips"
    return f"Join slices over the data-centre network: {chips_text} are {num_slices}*{chip.name}:{times(pod)}."


def _in_pod(chip: Chip, shape: ClusterShape) -> bool:
    """False for a shape of two axes if one is longer than the pod's. Optical switches form three axes of any length."""
    return len(shape) != 2 or all(size <= limit for size, limit in zip(shape, chip.pod_shape, strict=False))


def balanced_shape(num_chips: int, num_axes: int) -> ClusterShape:
    """Returns factors of ``num_chips`` that are as equal as possible, smallest first."""
    if num_axes == 1:
        return (num_chips,)
    smallest = max(size for size in range(1, round(num_chips ** (1 / num_axes)) + 1) if num_chips % size == 0)
    return (smallest, *balanced_shape(num_chips // smallest, num_axes - 1))
