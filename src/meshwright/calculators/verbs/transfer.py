"""`meshwright transfer`: the time of bytes from one memory to another, or of a collective over the links of an axis."""

from collections.abc import Iterator
from pathlib import Path

import click
from msgspec.structs import asdict

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.api.rates import rates_for
from meshwright.calculators.links.ring_steps import DRAWN_KINDS, collective_frames, leg_moves
from meshwright.calculators.links.routes import Via, parse_place, route
from meshwright.calculators.links.transfer import TransferLeg, array_bytes, parse_leg, transfer_times
from meshwright.cli.output import format_flop_count, say
from meshwright.cli.verb import CALIBRATION, Options, argument, option, verb
from meshwright.core.dims import COLLECTIVES, CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_bytes, format_flops, format_rate, format_seconds
from meshwright.cost.network.collectives import (
    GroupRates,
    KindRate,
    collective_bound_by,
    collective_time,
    leg_rates,
    ring_link_share,
)
from meshwright.cost.network.legs import Leg, group_legs, ring_hops, tree_hops, turns_text
from meshwright.cost.network.placement import physical_placement
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Table
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.efficiency import fitted_calibration

WORDS = {
    "all_gather": "Every device passes on what it got last, until all have every block",
    "reduce_scatter": "Blocks travel to their own device and are added on the way",
    "all_reduce": "A ReduceScatter, then an AllGather of the sums",
    "all_to_all": "Column b has the blocks for device b, which take the shortest way",
}


class Given(Options):
    size: str = argument()
    on: str = option("A cluster, such as v5e:4x4 or h100:8x256.")
    source: str | None = option(
        'Where it lies: a chip "0,0", "host:0,0", "1:0,0" in slice 1, "chips", "hosts".', "--from"
    )
    target: str | None = option("Where it goes, in the same words.", "--to")
    via: Via = option(
        "Network to use.",
        type=click.Choice(("ici", "dcn")),
        default="ici",
        needs={"between_hosts": "--from hosts, or from one slice to another"},
    )
    extra: tuple[str, ...] = option("A further leg: hbm, pcie*16, 15GB@ici*2:6hops, 275GFLOP@compute.", "--leg")
    axis: str | None = option("Price collectives instead, over these links: x, or x,y, or domain,nodes.")
    collective: CollectiveKind | None = option("One collective instead of all.", type=click.Choice(COLLECTIVES))
    one_way: bool = option("The ring of --axis used in one direction only.")
    frames: Path | None = option(
        "Draw --collective hop by hop: a picture (.png), or one a step in a folder.", metavar="PATH", extra="draw"
    )
    dtype: str = option(
        "Dtype of a compute leg's products.", default="bf16", needs={"computes": "a --leg of FLOPs@compute"}
    )
    calibration: Path | None = CALIBRATION

    @property
    def between_hosts(self) -> bool:
        """True if bytes may cross the network between hosts: from all hosts, or between slices."""
        slice_ids = {(end or "").removeprefix("host:").rpartition(":")[0] or "0" for end in (self.source, self.target)}
        return self.source == "hosts" or len(slice_ids) > 1

    @property
    def computes(self) -> bool:
        """True if a leg is a calculation."""
        return any("compute" in leg for leg in self.extra)


@verb(Given)
def command(given: Given) -> Answer:
    """Show the time to move SIZE ("15GB" or "bf16[8,128,8192]"): leg by leg, or by a collective over --axis."""
    cluster, num_bytes = parse_cluster(given.on), array_bytes(given.size)
    if given.axis is not None or given.collective is not None:
        if given.source or given.target or given.extra:
            raise InputError("--axis prices collectives; --from, --to and --leg a transfer. Give one or the other.")
        return _collectives(given, cluster, num_bytes)
    if given.one_way or given.frames is not None:
        raise InputError(f"{'--one-way' if given.one_way else '--frames'} is for a collective on a ring. Give --axis.")
    if given.calibration is not None:
        raise InputError("--calibration holds rates of collectives: give --axis. Legs go by the data sheet.")
    if (given.source is None) != (given.target is None):
        raise InputError("--from and --to go together. Write for example --from 0,0 --to 3,3.")
    legs: list[TransferLeg] = []
    if given.source is not None and given.target is not None:
        source, target = (parse_place(text, cluster) for text in (given.source, given.target))
        legs += route(cluster, source, target, num_bytes, via=given.via)
    legs += [parse_leg(text, cluster.chip, num_bytes=num_bytes, dtype=given.dtype) for text in given.extra]
    time_facts = transfer_times(legs)
    units = ["FLOP" if leg.channel == "compute" else "bytes" for leg in legs]
    rows = [{**asdict(leg), "unit": unit, "send_s": leg.send_s} for leg, unit in zip(legs, units, strict=True)]
    facts = {"cluster": cluster.short_name, "bytes": num_bytes, "legs": rows, **time_facts}
    pieces = _transfer_text(f"{format_bytes(num_bytes)} on {cluster.short_name}", legs, time_facts)
    return Answer(facts, pieces, raw=[rows, [facts]])


def _transfer_text(title: str, legs: list[TransferLeg], facts: Facts) -> Iterator[Piece]:
    rows = []
    for leg_number, leg in enumerate(legs, 1):
        show, show_rate = (format_flop_count, format_flops) if leg.channel == "compute" else (format_bytes, format_rate)
        lanes_text = f"{leg.lanes} x " if leg.lanes > 1 else ""
        cells = (
            show(leg.amount),
            lanes_text + show_rate(leg.rate),
            format_seconds(leg.latency_s),
            format_seconds(leg.send_s),
        )
        rows.append([f"{leg_number}  {leg.name}", leg.channel, *cells])
    yield Table(["leg", "channel", "amount", "rate", "latency", "time"], rows, title)
    text_by_field = {name: format_seconds(value) for name, value in facts.items() if isinstance(value, float)}
    total_text = f"{text_by_field['time_s_pipelined']} with legs pipelined: first byte + slowest leg"
    unpipelined_text = f"; {text_by_field['time_s_in_turn']} without pipelining" * (len(legs) > 1)
    yield Fact("time", total_text + unpipelined_text)
    yield Fact("first byte", f"after {text_by_field['first_byte_s']}, the latency of all hops")
    slow_leg = max(legs, key=lambda leg: leg.send_s)
    yield Fact("slowest leg", f"{slow_leg.name} ({slow_leg.channel}), {text_by_field['slowest_leg_s']}")
    yield Fact("bound by", facts["bound_by"])


# -- collectives ----------------------------------------------------------------------------------------


COLUMNS: Facts = {
    "collective": "kind",
    "by bandwidth": "bandwidth_s",
    "by latency": "latency_s",
    "time": "time_s",
    "bound by": "bound_by",
    "latency binds below": "latency_bound_below_bytes",
}


def _collectives(given: Given, cluster: Cluster, num_bytes: float) -> Answer:
    """Returns seconds of each collective over whole physical axes, of ``num_bytes`` on all chips together."""
    placement = physical_placement(cluster)
    if given.axis is None:
        raise InputError(f"--collective needs --axis, one or several of {', '.join(placement.mesh)}.")
    axes, two_way = [name.strip() for name in given.axis.split(",")], not given.one_way
    legs, calibration = group_legs(placement, axes), rates_for(cluster, given.calibration)
    rates = leg_rates(legs, calibration) if two_way else one_way_rates(legs, calibration)
    if rates.size == 1:
        raise InputError(f"axis {','.join(axes)} of {cluster.short_name} has one chip: there is nothing to send.")
    rows = []
    for kind in (kind for kind in COLLECTIVES if kind in rates.kinds and given.collective in (None, kind)):
        rate, time_s = rates[kind], collective_time(kind, num_bytes, rates)
        rows.append(
            {
                "kind": kind,
                "bandwidth_s": num_bytes * rate.seconds_per_byte,
                "latency_s": rate.latency_s,
                "time_s": time_s,
                "bytes_per_s": num_bytes / time_s if time_s else None,
                "bound_by": collective_bound_by(kind, num_bytes, rates),
                "latency_bound_below_bytes": rate.latency_s / rate.seconds_per_byte if rate.seconds_per_byte else None,
                "link_bytes": link_bytes(kind, num_bytes, legs, two_way=two_way),
            }
        )
    facts: Facts = {
        "cluster": cluster.short_name,
        "axes": axes,
        "group_size": rates.size,
        "bytes": num_bytes,
        "two_way": two_way,
        "rates": _rates_text(cluster, legs, calibration),
        "turns": turns_text(placement, axes),
        "latency_forms": _latency_forms(legs),
        "collectives": rows,
    }
    if given.frames is not None:
        facts["frames"] = _draw_frames(given.frames, given.collective, legs, cluster.short_name, two_way=two_way)
    return Answer(facts, _collectives_text(facts))


def _rates_text(cluster: Cluster, legs: tuple[Leg, ...], calibration: Calibration | None) -> str:
    """Returns the source of the link rates: the calibration, or the data sheet, with the share of it that plans use."""
    if calibration is not None:
        return calibration.describe()
    fitted, levels = fitted_calibration(cluster.chip), dict.fromkeys(leg.level for leg in legs)
    share_texts = [f"{getattr(fitted.efficiency, level):.0%} of {level}" for level in levels] if fitted else []
    return "line rates of the data sheet" + (f"; plans take the fitted {', '.join(share_texts)}" if share_texts else "")


def is_ring(legs: tuple[Leg, ...]) -> bool:
    """True if the group is one whole torus axis that wraps around."""
    return len(legs) == 1 and legs[0].level == "ici" and bool(legs[0].wraps) and legs[0].size > 1


def one_way_rates(legs: tuple[Leg, ...], calibration: Calibration | None = None) -> GroupRates:
    """Returns the rates of a ring used in one direction: V / w, half the rate of both directions, n - 1 hops.

    An AllToAll takes half as long as an AllGather, as a block travels half the ring on average (a quarter in both
    directions, on twice the links). Raises InputError for a group that is not a ring. Source: How to Scale Your Model,
    exercise 3.10.
    """
    if not is_ring(legs):
        raise InputError("--one-way needs a ring: a torus axis that wraps around, such as one of 16 of v5e:16x16.")
    leg, efficiency, hop_s = legs[0], 1.0, legs[0].hop_s
    if calibration is not None:
        efficiency, hop_s = calibration.efficiency.ici, calibration.hop_s.get("ici", hop_s)
    s_per_byte, ring_latency_s = leg.sharing / (leg.bytes_per_s * efficiency), ring_hops(leg.size) * hop_s
    ring_rate = KindRate(s_per_byte, ring_latency_s, level="ici")
    return GroupRates(
        size=leg.size,
        kinds={
            "all_gather": ring_rate,
            "reduce_scatter": ring_rate,
            "all_reduce": KindRate(2 * s_per_byte, 2 * ring_latency_s, level="ici"),
            "all_to_all": KindRate(s_per_byte / 2, ring_latency_s, level="ici"),
            "permute": KindRate(s_per_byte, hop_s, level="ici"),
        },
    )


def link_bytes(kind: CollectiveKind, num_bytes: float, legs: tuple[Leg, ...], *, two_way: bool) -> float | None:
    """Returns the bytes that cross one link of a ring in one direction; None for a group that is not a ring."""
    if not is_ring(legs):
        return None
    return num_bytes if kind == "permute" else num_bytes * ring_link_share(kind, legs[0].size, two_way=two_way)


def _latency_forms(legs: tuple[Leg, ...]) -> dict[str, float] | None:
    """Returns hops and seconds of latency of a gather over switches, by ring and by tree; None without switches."""
    network_legs = [leg for leg in legs if leg.level in ("network", "dcn")]
    value_by_form: dict[str, float] = {}
    for name, count_hops in (("ring", ring_hops), ("tree", tree_hops)):
        value_by_form[f"{name}_hops"] = sum(count_hops(leg.size) for leg in network_legs)
        value_by_form[f"{name}_s"] = sum(count_hops(leg.size) * leg.hop_s for leg in network_legs)
    return value_by_form if network_legs else None


def _collectives_text(facts: Facts) -> Iterator[Piece]:
    title = (
        f"{format_bytes(facts['bytes'])} (the whole array) over {','.join(facts['axes'])} of {facts['cluster']}: "
        f"{counted(facts['group_size'], 'chip')}{'' if facts['two_way'] else ', one way round'}"
    )
    kinds = [row["kind"] for row in facts["collectives"]]
    has_link_bytes = any(row["link_bytes"] is not None for row in facts["collectives"])
    link_column = {"bytes over a link": "link_bytes"} if has_link_bytes else {}
    yield Table.of(facts["collectives"], {**COLUMNS, **link_column}, title)
    if has_link_bytes:
        ways_text = "mean of both directions" if facts["two_way"] else "the only one used"
        yield Condition(f"bytes over a link of the ring: in one direction, {ways_text}")
    yield Condition(f"rates: {facts['rates']}")
    if facts["turns"] and "reduce_scatter" in kinds:
        yield Condition(facts["turns"])
    if "permute" in kinds:
        yield Condition("permute: each chip sends the whole size to its neighbour")
    forms = facts["latency_forms"]
    if forms:
        yield Condition(
            f"latency of a gather over switches: tree, {forms['tree_hops']:,} hops, {format_seconds(forms['tree_s'])} "
            f"(counted here); ring, {forms['ring_hops']:,} hops, {format_seconds(forms['ring_s'])}"
        )


# -- pictures -------------------------------------------------------------------------------------------


def _draw_frames(
    path: Path, kind: CollectiveKind | None, legs: tuple[Leg, ...], place: str, *, two_way: bool
) -> list[str]:
    """Draws all steps in one picture, or one picture a step if the path is a folder; returns the files."""
    from meshwright.report.arrays.ring import MAX_DEVICES, Numbers, ring_figure
    from meshwright.report.figure import PICTURES, save

    draw_kind = next((known_kind for known_kind in DRAWN_KINDS if known_kind == kind), None)
    if draw_kind is None:
        kinds_text = f"{', '.join(DRAWN_KINDS[:-1])} or {DRAWN_KINDS[-1]}"
        raise InputError(f"--frames draws one collective: give --collective {kinds_text}.")
    if len(legs) != 1:
        raise InputError("--frames draws one axis. Name one --axis, such as x of v5e:4x4 or domain of h100:8x4.")
    leg, size, moves = legs[0], int(legs[0].size), leg_moves(draw_kind, legs[0], two_way=two_way)
    if size > MAX_DEVICES:
        raise InputError(f"--frames shows at most {MAX_DEVICES} devices and the axis has {size}. Name a smaller one.")
    layout, usage = "a line", "both directions of each link are used"
    if leg.level != "ici":
        layout, usage = ("a switch", "in one step") if len(moves) == 1 else ("trees", "each step reaches twice as far")
    elif leg.wraps:
        layout, usage = "a ring", "both ways round" if two_way else "one way round"
    frames = collective_frames(draw_kind, size, moves)
    title = f"{BOOK_NAMES[draw_kind]} on {layout} of {size}: {counted(len(frames) - 1, 'step')}"
    subtitle = f"{WORDS[draw_kind]}; {usage} ({place})."
    numbers: Numbers = "sources" if draw_kind == "all_gather" else "blocks" if draw_kind == "all_to_all" else "addends"
    if path.suffix.lower() in PICTURES:
        paths = [save(ring_figure(frames, title=title, subtitle=subtitle, numbers=numbers), path)]
    else:
        paths = [
            save(ring_figure([frame], title=title, numbers=numbers), path / f"step-{frame.step:02}.png")
            for frame in frames
        ]
    say(f"wrote {paths[0]}" if len(paths) == 1 else f"wrote {len(paths)} pictures to {path}")
    return [str(file) for file in paths]
