"""Recovery policies of a fleet: each turns a list of faults into the fleet's seconds by category (`WORDS`)."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from meshwright.simulate.fleet.fleet import Fault, FleetPolicy, TrainingFleet
from meshwright.simulate.fleet.run import (
    DATA,
    INIT,
    OTHER,
    PREP,
    RECOVERY,
    RESTORE,
    SAVE,
    STARTUP,
    WORDS,
    WORK,
    FleetRun,
    Phases,
)

Trained = list[tuple[float, float, float]]
"""(start, end, share of the fleet) of each span of seconds in which steps ran."""


def run_policy(
    fleet: TrainingFleet,
    policy: FleetPolicy,
    faults: Sequence[Fault],
    duration_s: float,
    trained: Trained | None = None,
) -> list[float]:
    """Returns the fleet's seconds in each category of `WORDS`; they sum to ``duration_s``. Fills ``trained`` if given.

    ``faults`` are sorted by time; faults from ``duration_s`` on are ignored. Steps begin at time 0; work that is
    unsaved at the end counts as work."""
    happened = [fault for fault in faults if fault.time_s < duration_s]
    run_all = _elastic if policy == "elastic" else _apart
    runs = run_all(fleet, policy, happened, duration_s, trained)
    return [sum(run.spent[word] for run in runs) for word in range(len(WORDS))]


class _Spares:
    """Times at which spare hosts become available; a rebooted or repaired host becomes a spare."""

    def __init__(self, fleet: TrainingFleet) -> None:
        self._times, self._returns = fleet.times, [0.0] * fleet.num_spares
        heapify(self._returns)

    def wait_s(self, fault: Fault) -> float:
        """Returns the seconds from noticing a lost host until a spare is available, and reserves that spare; 0 for
        faults that lose no host."""
        if fault.kind not in ("host", "reboot"):
            return 0.0
        noticed_at_s = fault.time_s + self._times.noticed_s(fault.kind)
        away_s = self._times.reboot_s if fault.kind == "reboot" else self._times.repair_s
        heappush(self._returns, noticed_at_s + away_s)
        return max(0.0, heappop(self._returns) - noticed_at_s)


def _start(fleet: TrainingFleet, fault: Fault, wait_s: float, restore_s: float) -> Phases:
    """Returns the phases, (category, seconds), between a fault and the first step after it; none has 0 seconds."""
    times, found_s = fleet.times, fleet.times.found_s(fault.kind)
    seconds = {RECOVERY: found_s + wait_s, INIT: times.init_s, PREP: times.prep_s, STARTUP: times.startup_s}
    return [(word, s) for word, s in {**seconds, RESTORE: restore_s, DATA: times.data_s}.items() if s > 0]


def _keep_going(fleet: TrainingFleet, run: FleetRun, fault: Fault) -> bool:
    """Returns True after applying a fault that loses no work: a straggler slows the run down, a planned stop saves
    first. Returns False and does nothing for other faults."""
    times = fleet.times
    if fault.kind not in ("straggler", "planned"):
        return False
    if fault.kind == "straggler":
        run.slow_until_s, run.slow_loss = fault.time_s + times.straggler_s, 1 - 1 / times.slowdown
    elif not run.phases:
        run.stop([(SAVE, times.save_s), *_start(fleet, fault, 0.0, times.restore_s)])
    return True


def _apart(
    fleet: TrainingFleet, policy: FleetPolicy, faults: Sequence[Fault], duration_s: float, trained: Trained | None
) -> list[FleetRun]:
    """Returns the runs that stop independently: the whole fleet's ("stop", "memory"), or each island's ("diloco")."""
    times, spares = fleet.times, _Spares(fleet)
    num_runs = fleet.num_replicas if policy == "diloco" else 1
    steps = {"stop": fleet.checkpoint_steps, "memory": fleet.memory_steps, "diloco": fleet.outer_every}[policy]
    if policy == "memory":
        steps = min(steps, fleet.disk_steps)
    work_s = steps * fleet.step_s
    save_s = times.save_s * (1.0 if policy == "stop" else work_s / times.disk_s) + times.memory_s * (policy == "memory")
    outer_s = times.outer_s * (policy == "diloco")
    runs = [FleetRun(work_s, save_s, 1 / num_runs, outer_s) for _ in range(num_runs)]
    for run in runs:
        run.trained = trained
    for fault in faults:
        run = runs[fault.replica % num_runs]
        run.settle(fault.time_s)
        if _keep_going(fleet, run, fault):
            continue
        restore_s, to_disk = times.restore_s if policy == "stop" else times.copy_s, policy == "stop"
        # a neighbour has a copy of the state, unless it was lost too since the last recovery
        if policy == "memory" and fault.kind in ("host", "reboot"):
            to_disk = bool(run.lost_hosts & {(fault.host + side) % fleet.num_hosts for side in (-1, 1)})
            run.lost_hosts.add(fault.host)
        elif policy == "memory":  # memory has only the latest state, which is wrong
            to_disk = fault.kind == "corruption"
        elif policy == "diloco" and num_runs > 1:
            to_disk = all(other.ready_s > fault.time_s for other in runs if other is not run)
        lost = run.unsaved
        if fault.kind == "corruption":
            lost = run.spent[WORK] - run.saved_at(fault.time_s - fault.latent_s)
        run.lose(lost)
        if to_disk and policy != "stop":
            restore_s = times.restore_s
            for each in runs:  # loses all work since the last checkpoint on disk
                each.lose(each.spent[WORK] % (times.disk_s * each.share))
        run.stop(_start(fleet, fault, spares.wait_s(fault), restore_s))
    for run in runs:
        run.settle(duration_s)
    return runs


def _elastic(
    fleet: TrainingFleet, policy: FleetPolicy, faults: Sequence[Fault], duration_s: float, trained: Trained | None
) -> list[FleetRun]:
    """Returns the run of the live replicas, and a run for each period in which a replica was down.

    After a fault all replicas wait until it is noticed and they have regrouped, and lose the step in flight. A replica
    returns with a state copied from a live one, without a restart if it only lost its connections.
    """
    times, spares, num_replicas = fleet.times, _Spares(fleet), fleet.num_replicas
    work_s = fleet.disk_steps * fleet.step_s
    living = FleetRun(work_s, times.save_s, 1.0)
    living.trained = trained
    down: dict[int, FleetRun] = {}
    away = [living]
    returns: list[tuple[float, int]] = []

    def advance(time_s: float) -> None:
        while returns and returns[0][0] <= time_s:
            back_s, replica = heappop(returns)
            if replica in down and down[replica].ready_s == back_s:
                living.settle(back_s)
                down.pop(replica).settle(back_s)
                living.share = 1 - len(down) / num_replicas
                living.phases.append((OTHER, times.regroup_s))
        living.settle(time_s)

    for fault in faults:
        replica = fault.replica % num_replicas
        advance(fault.time_s)
        if fault.kind == "straggler":
            _keep_going(fleet, living, fault)
            continue
        if replica not in down:
            if fault.kind != "planned":
                if not living.phases and living.offset < work_s:
                    living.lose(living.offset % fleet.step_s * living.share)
                living.phases += [(RECOVERY, times.noticed_s(fault.kind)), (OTHER, times.regroup_s)]
            down[replica] = FleetRun(work_s, 0.0, 1 / num_replicas)
            away.append(down[replica])
            down[replica].now = fault.time_s
            living.share = 1 - len(down) / num_replicas
        elif fault.kind == "planned":
            continue
        lost = down[replica]
        lost.settle(fault.time_s)
        is_last = len(down) == num_replicas
        if is_last:
            living.lose(living.unsaved)
            living.stop([])
        if fault.kind == "link" and not is_last:
            lost.stop([(RECOVERY, times.noticed_s(fault.kind)), (RESTORE, times.copy_s)])
        else:
            lost.stop(_start(fleet, fault, spares.wait_s(fault), times.restore_s if is_last else times.copy_s))
        heappush(returns, (lost.ready_s, replica))
    advance(duration_s)
    for run in down.values():
        run.settle(duration_s)
    return away
