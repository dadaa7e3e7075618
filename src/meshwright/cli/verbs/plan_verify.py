"""`plan --verify`: the best strategies compiled for their hardware before they are offered."""

from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.api.proving import prove_strategy
from meshwright.cli.output import say
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes
from meshwright.plan.result import PlannedStrategy, PlanResult

if TYPE_CHECKING:
    from meshwright.verify.proof import Proof


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The strategies that compile and fit, best first, and what was found of each that was tried."""

    result: PlanResult
    table: tuple[dict[str, Any], ...]


def verified(result: PlanResult) -> Verified:
    """The plan with those of its strategies that the compiler accepts; each costs it a few seconds.

    Raises CannotRunError where it accepts none.
    """
    kept: list[PlannedStrategy] = []
    found: list[dict[str, Any]] = []
    refusals: list[str] = []
    for number, one in enumerate(result.strategies, 1):
        proof = prove_strategy(msgspec.structs.replace(one.setting, calibration=result.setting.rates), one.strategy)
        needed = None if proof.memory is None else proof.memory.needed
        found.append({"strategy": number, "runs": proof.runs, "refusal": proof.refusal, "hbm_bytes_needed": needed})
        say(f"verified {number} of {len(result.strategies)}: {_words(proof)}")
        if proof.runs:
            kept.append(one)
        else:
            refusals.append(proof.refusal)
    if not kept:
        raise CannotRunError(
            f"the compiler accepts none of the {len(refusals)} best strategies. Of the first: {refusals[0]}"
        )
    how = _how(result)
    note = f"{len(kept)} of {len(result.strategies)} strategies {how}"
    return Verified(
        result=msgspec.structs.replace(result, strategies=tuple(kept), notes=(*result.notes, note)),
        table=tuple(found),
    )


def _words(proof: "Proof") -> str:
    if not proof.runs:
        return proof.refusal
    if proof.memory is None:
        return "compiles"
    return f"compiles and fits, {format_bytes(proof.memory.needed)} a chip"


def _how(result: PlanResult) -> str:
    """What the compiler has shown of those that are left."""
    from meshwright.verify.targets import usable_target

    target = usable_target(result.cluster)
    if target.platform == "cpu":
        return "compile for emulated CPU devices, which shows nothing of their memory"
    return f"compile for {result.cluster.chip.full_name or result.cluster.chip.name} and fit"
