"""`meshwright transfer`: how long bytes take from one place to another, or a collective over the links of an axis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from meshwright.api.rates import rates_for
from meshwright.calculators.links.one_way import link_share, one_way_rates
from meshwright.calculators.links.routes import Via, parse_place, route
from meshwright.calculators.links.transfer import Transfer, TransferLeg, array_bytes, parse_leg
from meshwright.calculators.verbs.transfer_frames import draw_frames
from meshwright.cli.output import or_dash
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.dims import COLLECTIVES, CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.cost.network.collectives import GroupRates, collective_bound_by, collective_time, leg_rates
from meshwright.cost.network.legs import Leg, group_legs, ring_hops, tree_hops
from meshwright.cost.network.placement import physical_placement
from meshwright.report.answer import Answer, Fact, Piece, Table
from meshwright.spec.cluster import Cluster, parse_cluster

COLUMN = 14


class Given(Options):
    size: str = argument()
    on: str = option("A cluster, such as v5e:4x4 or h100:8x256.")
    source: str | None = option(
        'Where it lies: a chip "0,0", "host:0,0", "1:0,0" in slice 1, "chips", "hosts".', "--from"
    )
    target: str | None = option("Where it goes: the same words.", "--to")
    via: Via = option("From hosts: how.", type=click.Choice(("ici", "dcn")), default="ici")
    extra: tuple[str, ...] = option("A further leg: hbm, pcie*16, 15GB@ici*2:6hops, 275GFLOP@compute.", "--leg")
    axis: str | None = option("Price collectives instead, over these links: x, or x,y, or domain,nodes.")
    collective: CollectiveKind | None = option("One collective instead of all.", type=click.Choice(COLLECTIVES))
    one_way: bool = option("The ring of --axis used in one direction only.")
    frames: Path | None = option(
        "Draw --collective hop by hop: one picture (.png), or a picture a step in a folder.", metavar="PATH"
    )
    dtype: str = option("Of the products of a compute leg.", default="bf16")
    calibration: Path | None = option("Measured rates of that cluster (TOML).")


@verb(Given)
def command(given: Given) -> Answer:
    """Time to move SIZE ("15GB" or "bf16[8,128,8192]"): leg by leg, or by a collective over --axis."""
    cluster, num_bytes = parse_cluster(given.on), array_bytes(given.size)
    if given.axis is not None or given.collective is not None:
        if given.source or given.target or given.extra:
            raise InputError("--axis prices collectives; --from, --to and --leg a transfer. Give one or the other.")
        legs = group_legs(physical_placement(cluster), _axes(given.axis, cluster))
        measured = rates_for(cluster, given.calibration)
        rates = one_way_rates(legs, measured) if given.one_way else leg_rates(legs, measured)
        found = collective_facts(
            cluster, _axes(given.axis, cluster), num_bytes, given.collective, legs, rates, two_way=not given.one_way
        )
        if given.frames is not None:
            found["frames"] = [
                str(p) for p in draw_frames(given.frames, given.collective, legs, cluster, two_way=not given.one_way)
            ]
        return Answer(found, _collectives_text(found))
    if given.one_way or given.frames is not None:
        raise InputError(f"{'--one-way' if given.one_way else '--frames'} is for a collective on a ring. Give --axis.")
    if given.calibration is not None:
        raise InputError("--calibration holds rates of collectives: give --axis. Legs go by the data sheet.")
    passed = _route(cluster, given.source, given.target, num_bytes, given.via)
    passed += [parse_leg(text, cluster.chip, num_bytes=num_bytes, dtype=given.dtype) for text in given.extra]
    moved = Transfer(legs=tuple(passed))
    return Answer(transfer_facts(cluster, num_bytes, moved), _transfer_text(cluster, num_bytes, moved))


# -- a transfer -----------------------------------------------------------------------------------------


def _route(cluster: Cluster, source: str | None, target: str | None, num_bytes: float, via: Via) -> list[TransferLeg]:
    if source is None and target is None:
        return []
    if source is None or target is None:
        raise InputError("--from and --to go together. Write for example --from 0,0 --to 3,3.")
    return route(cluster, parse_place(source, cluster), parse_place(target, cluster), num_bytes, via=via)


def transfer_facts(cluster: Cluster, num_bytes: float, moved: Transfer) -> dict[str, Any]:
    """Every leg, and the times of all of them together."""
    return {
        "cluster": cluster.short_name,
        "bytes": num_bytes,
        "legs": [
            {
                "name": leg.name,
                "channel": leg.channel,
                "amount": leg.amount,
                "lanes": leg.lanes,
                "rate": leg.rate,
                "hops": leg.hops,
                "latency_s": leg.latency_s,
                "send_s": leg.send_s,
            }
            for leg in moved.legs
        ],
        "first_byte_s": moved.first_byte_s,
        "slowest_leg_s": moved.slowest.send_s,
        "slowest_leg": moved.slowest.name,
        "time_s_pipelined": moved.pipelined_s,
        "time_s_in_turn": moved.in_turn_s,
        "bound_by": moved.bound_by,
    }


def _transfer_text(cluster: Cluster, num_bytes: float, moved: Transfer) -> Iterator[Piece]:
    rows = [
        [f"{number}  {leg.name}", leg.channel, _amount(leg), _rate(leg), format_seconds(leg.latency_s),
         format_seconds(leg.send_s)]
        for number, leg in enumerate(moved.legs, 1)
    ]  # fmt: skip
    title = f"{format_bytes(num_bytes)} on {cluster.short_name}"
    yield Table(["leg", "channel", "amount", "rate", "latency", "time"], rows, title)
    yield Fact("first byte", f"{format_seconds(moved.first_byte_s)} (the latency of every hop)", column=COLUMN)
    slow = moved.slowest
    yield Fact("slowest leg", f"{slow.name} ({slow.channel}), {format_seconds(slow.send_s)}", column=COLUMN)
    total = f"{format_seconds(moved.pipelined_s)} pipelined: first byte + slowest leg"
    if len(moved.legs) > 1:
        total += f"; {format_seconds(moved.in_turn_s)} if each leg waits for the one before"
    yield Fact("last byte", total, column=COLUMN)
    yield Fact("bound by", moved.bound_by, column=COLUMN)


def _amount(leg: TransferLeg) -> str:
    return format_flops(leg.amount, unit="FLOP") if leg.channel == "compute" else format_bytes(leg.amount)


def _rate(leg: TransferLeg) -> str:
    one = format_flops(leg.rate) if leg.channel == "compute" else f"{format_bytes(leg.rate)}/s"
    return f"{leg.lanes} x {one}" if leg.lanes > 1 else one


# -- collectives ----------------------------------------------------------------------------------------


def _axes(text: str | None, cluster: Cluster) -> tuple[str, ...]:
    if text is None:
        names = ", ".join(physical_placement(cluster).mesh)
        raise InputError(f"--collective needs --axis, one or several of {names}.")
    return tuple(name.strip() for name in text.split(","))


def collective_facts(
    cluster: Cluster,
    axes: tuple[str, ...],
    num_bytes: float,
    only: CollectiveKind | None,
    legs: tuple[Leg, ...],
    rates: GroupRates,
    *,
    two_way: bool = True,
) -> dict[str, Any]:
    """Seconds of each collective over whole physical axes, for an array of so many bytes when gathered."""
    if rates.size == 1:
        raise InputError(f"axis {','.join(axes)} of {cluster.short_name} has one chip: there is nothing to send.")
    kinds = [kind for kind in COLLECTIVES if kind in rates.kinds and only in (None, kind)]
    return {
        "cluster": cluster.short_name,
        "axes": list(axes),
        "group_size": rates.size,
        "bytes": num_bytes,
        "two_way": two_way,
        "latency_forms": _latency_forms(legs),
        "collectives": [
            {
                **_priced(kind, num_bytes, rates),
                "link_bytes": _times(link_share(kind, legs, two_way=two_way), num_bytes),
            }
            for kind in kinds
        ],
    }


def _times(share: float | None, num_bytes: float) -> float | None:
    return None if share is None else share * num_bytes


def _priced(kind: CollectiveKind, num_bytes: float, rates: GroupRates) -> dict[str, Any]:
    rate, time_s = rates[kind], collective_time(kind, num_bytes, rates)
    return {
        "kind": kind,
        "bandwidth_s": num_bytes * rate.seconds_per_byte,
        "latency_s": rate.setup_s + rate.floor_s,
        "time_s": time_s,
        "bytes_per_s": num_bytes / time_s if time_s else None,
        "bound_by": collective_bound_by(kind, num_bytes, rates),
        "latency_bound_below_bytes": rate.floor_s / rate.seconds_per_byte if rate.seconds_per_byte else None,
    }


def _latency_forms(legs: tuple[Leg, ...]) -> dict[str, float] | None:
    """Latency of a gather over switches if members pass on in a ring, and in a tree; None where there are none."""
    network = [leg for leg in legs if leg.level in ("network", "dcn")]
    if not network:
        return None
    return {
        "ring_hops": sum(ring_hops(leg.size) for leg in network),
        "tree_hops": sum(tree_hops(leg.size) for leg in network),
        "ring_s": sum(ring_hops(leg.size) * leg.hop_s for leg in network),
        "tree_s": sum(tree_hops(leg.size) * leg.hop_s for leg in network),
    }


def _collectives_text(found: dict[str, Any]) -> Iterator[Piece]:
    rows = [
        [one["kind"], format_seconds(one["bandwidth_s"]), format_seconds(one["latency_s"]),
         format_seconds(one["time_s"]), one["bound_by"], or_dash(one["latency_bound_below_bytes"], format_bytes)]
        for one in found["collectives"]
    ]  # fmt: skip
    title = (
        f"{format_bytes(found['bytes'])} (the whole array) over {','.join(found['axes'])} of {found['cluster']}: "
        f"{found['group_size']:,} chips{'' if found['two_way'] else ', one way round'}"
    )
    columns = ["collective", "by bandwidth", "by latency", "time", "bound by", "latency binds below"]
    if any(one["link_bytes"] is not None for one in found["collectives"]):
        columns.append("over a link")
        rows = [[*row, format_bytes(one["link_bytes"])] for row, one in zip(rows, found["collectives"], strict=True)]
    yield Table(columns, rows, title)
    if columns[-1] == "over a link":
        ways = "both directions of the ring are used" if found["two_way"] else "the ring is used in one direction"
        yield f"over a link: what crosses each link of the ring in one direction; {ways}"
    if any(one["kind"] == "permute" for one in found["collectives"]):
        yield "permute: each chip sends so many bytes to its neighbour"
    forms = found["latency_forms"]
    if forms:
        yield (
            f"latency of the network for one gather: ring {forms['ring_hops']:,} hops, "
            f"{format_seconds(forms['ring_s'])}; tree {forms['tree_hops']:,} hops, {format_seconds(forms['tree_s'])} "
            f"(taken: small arrays go by the tree)"
        )
