"""Rates for a cluster: a given calibration, this machine measured once, or the data sheet."""

from pathlib import Path

import click

from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder
from meshwright.core.toml_file import read_toml
from meshwright.spec.calibration import Calibration, load_calibration, save_calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.efficiency import fitted_calibration

DATASHEET = "datasheet"
"""Given in place of a calibration file: data-sheet rates, whatever has been fitted."""


def rates_for(cluster: Cluster, calibration: Path | None, *, fitted: bool = False) -> Calibration | None:
    """The calibration file when one is given; for ``cpu:N`` this machine's rates; else the data sheet, which is None.

    Verbs that predict a whole step take the chip's ``fitted`` numbers where there are any, unless the word "datasheet"
    is given; those that do the book's arithmetic do not. This machine is measured the first time (a minute or two) and
    the rates are kept in the cache folder.
    """
    if str(calibration) == DATASHEET:
        if cluster.kind == "host":
            raise InputError(f"{cluster.short_name} is this machine, which has no data sheet. Leave --calibration out.")
        return None
    if calibration is not None:
        found = load_calibration(calibration)
        if found.chip != cluster.chip.name:
            raise InputError(
                f"{calibration} holds rates of {found.chip} and the cluster is of {cluster.chip.name}. "
                f"Give a calibration of {cluster.chip.name}."
            )
        if cluster.kind == "host" and found.devices not in (None, cluster.num_chips):
            raise InputError(
                f"{calibration} holds rates of {found.devices} emulated devices at once, and {cluster.short_name} is "
                f"{cluster.num_chips}, which share the machine otherwise. Measure it: bench --on {cluster.short_name} "
                f"-o FILE, or leave --calibration out."
            )
        return found
    if cluster.kind != "host":
        return fitted_calibration(cluster.chip) if fitted else None
    kept = cache_folder() / f"calibration-{cluster.short_name.replace(':', '-')}.toml"
    return _kept(kept) or measure(cluster, keep=kept)


def _kept(path: Path) -> Calibration | None:
    """Rates of this machine that were kept; None for none, changed ones and those of versions that measured others."""
    try:
        found = None if not path.exists() or read_toml(path).is_changed else load_calibration(path)
    except InputError:
        return None
    whole = found and found.host and {rate.kind for rate in found.collectives} == set(COLLECTIVES)
    return found if whole else None


def measure(cluster: Cluster, *, keep: Path) -> Calibration:
    """This machine measured as ``cluster`` now, and written to ``keep``."""
    from meshwright.bench.machine import measure_machine
    from meshwright.parallel.mesh import emulate_devices

    click.echo(f"measuring this machine as {cluster.short_name}, a minute or two (kept in {keep})", err=True)
    emulate_devices(cluster.num_chips)
    found = measure_machine(cluster.num_chips, say=lambda line: click.echo(f"  {line}", err=True))
    try:
        save_calibration(found, keep)
    except OSError as error:
        click.echo(f"the rates are not kept in {keep}: {error.strerror}", err=True)
    return found
