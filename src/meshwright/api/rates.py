"""Rates for a cluster: a given calibration, this machine measured once, or the data sheet."""

from functools import partial
from pathlib import Path

import click

from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import InputError
from meshwright.core.extras import require
from meshwright.core.files import cache_folder
from meshwright.core.toml_file import read_toml
from meshwright.spec.calibration import Calibration, load_calibration, save_calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.efficiency import fitted_calibration

DATASHEET = "datasheet"
"""Value of a ``calibration`` argument that selects data-sheet rates, even for a chip with fitted rates."""


def rates_for(
    cluster: Cluster, calibration: Path | None, *, fitted: bool = False, measures: bool = True
) -> Calibration | None:
    """Returns the rates of a file if one is given; for ``cpu:N`` this machine's; else None, which means the data sheet.

    With ``fitted`` the chip's fitted rates, if it has any, replace None, unless ``calibration`` is "datasheet". This
    machine is measured at the first call (a minute or two), and its rates stay in the cache folder; without
    ``measures`` only rates in the cache folder are returned, or None. A cluster of islands has the rates of one. Raises
    InputError for a file of another chip or number of emulated devices, and for "datasheet" with ``cpu:N``.
    """
    cluster = cluster.island
    if str(calibration) == DATASHEET:
        if cluster.kind == "host":
            raise InputError(f"{cluster.short_name} is this machine, which has no data sheet. Leave --calibration out.")
        return None
    if calibration is not None:
        rates = load_calibration(calibration)
        if rates.chip != cluster.chip.name:
            raise InputError(
                f"{calibration} has rates of {rates.chip}, but the chips of the cluster are {cluster.chip.name}. "
                f"Give a calibration of {cluster.chip.name}."
            )
        if cluster.kind == "host" and rates.devices not in (None, cluster.num_chips):
            raise InputError(
                f"{calibration} has rates of {rates.devices} emulated devices, but {cluster.short_name} emulates "
                f"{cluster.num_chips}, whose rates differ. Measure them (bench --on {cluster.short_name} -o FILE), or "
                f"leave --calibration out."
            )
        return rates
    if cluster.kind != "host":
        return fitted_calibration(cluster.chip) if fitted else None
    kept_path = cache_folder() / f"calibration-{cluster.short_name.replace(':', '-')}.toml"
    kept_rates = _kept(kept_path)
    if not measures or (kept_rates and kept_rates.host):
        return kept_rates
    return measure(cluster, keep=kept_path, begun=kept_rates)


def _kept(path: Path) -> Calibration | None:
    """Returns the rates of the file; None if there is no file, or if it was edited, is damaged or lacks some rates.

    The rates have no ``host`` if measuring stopped before a training step was measured.
    """
    try:
        rates = None if not path.exists() or read_toml(path).is_changed else load_calibration(path)
    except InputError:
        return None
    is_complete = rates and (rates.devices == 1 or {rate.kind for rate in rates.collectives} == set(COLLECTIVES))
    return rates if is_complete and rates and "bf16" in rates.weight_bytes_per_s else None


def measure(cluster: Cluster, *, keep: Path, begun: Calibration | None = None) -> Calibration:
    """Measures this machine as ``cluster``, writes the rates to ``keep`` and returns them.

    Rates of products, memory and collectives are measured and written first, then rates of the host, from a training
    step. With ``begun``, which already has the first ones, only the training step is measured.
    """
    require("run", f"measuring this machine as {cluster.short_name}")
    from meshwright.bench.machine import measure_machine, with_host_rates
    from meshwright.parallel.mesh import emulate_devices

    say = partial(click.echo, err=True)

    def keep_rates(found: Calibration) -> Calibration:
        try:
            save_calibration(found, keep)
        except OSError as error:
            say(f"the rates are not kept in {keep}: {error.strerror}")
        return found

    machine_text = "the rest of this machine" if begun else "this machine"
    say(f"measuring {machine_text} as {cluster.short_name}, a minute or two, more under load (kept in {keep})")
    emulate_devices(cluster.num_chips)
    rates = begun or keep_rates(measure_machine(cluster.num_chips, say=lambda line: say(f"  {line}")))
    return keep_rates(with_host_rates(rates, lambda line: say(f"  {line}")))
