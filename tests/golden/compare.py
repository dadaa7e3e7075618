"""What the product gives now, beside the golden files: every difference, and which of them somebody has accepted.

    python -m tests.golden.compare                      every kind; proofs where the compilers are installed
    python -m tests.golden.compare steps plans          these kinds
    python -m tests.golden.compare --update losses      write golden files anew

Exit code 1 where a difference is not in ``accepted.toml``.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.golden import environment
from tests.golden.differences import Difference, compare, judge, read_accepted
from tests.golden.files import Golden, as_read, read, write

KINDS: dict[str, tuple[str, str]] = {
    "steps": ("tests.golden.kind_steps", "make"),
    "plans": ("tests.golden.kind_plans", "make"),
    "losses": ("tests.golden.kind_losses", "make"),
    "commands": ("tests.golden.kind_commands", "make"),
    "proofs": ("tests.golden.kind_commands", "make_proofs"),
}
"""Kind -> module and function that make it. Losses come before commands, which may begin JAX in their own way."""

ACCEPTED = environment.FOLDER / "accepted.toml"


def main(arguments: Sequence[str]) -> int:
    """Compare the kinds that are asked for, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--update", action="store_true", help="write the golden files of the kinds that are named")
    parser.add_argument("--accepted", type=Path, default=ACCEPTED)
    asked = parser.parse_args(arguments)
    for kind in asked.kinds:
        if kind not in KINDS:
            parser.error(f"there is no kind {kind}: {', '.join(KINDS)}")
    if asked.update and not asked.kinds:
        parser.error("name the kinds to write")
    environment.fix()
    chosen = [kind for kind in asked.kinds or KINDS if _can_make(kind)]
    if asked.update:
        for kind in chosen:
            path = write(kind, _made(kind))
            print(f"wrote {path.relative_to(environment.ROOT)}, {path.stat().st_size:,} bytes")
        return 0
    found = [one for kind in chosen for one in compare(read(kind), as_read(_made(kind)), kind)]
    return report(found, asked.accepted, chosen)


def report(
    found: Sequence[Difference], accepted: Path, kinds: Sequence[str], say: Callable[[str], None] = print
) -> int:
    """Print every difference and what was decided; the exit code."""
    verdict = judge(found, read_accepted(accepted) if accepted.exists() else (), kinds)
    for entry, count in verdict.counts:
        say(f"accepted {count:5d}  {' '.join(entry.where)}: {entry.reason}")
    for entry in verdict.stale:
        say(f"stale: nothing differs at {' '.join(entry.where)} ({entry.reason})")
    for entry, digest in verdict.moved:
        say(f"changed: {' '.join(entry.where)} had other differences when it was accepted; digest is {digest} now")
    for difference in verdict.refused:
        say(str(difference))
    say(
        f"{len(found)} differences from the golden files of {', '.join(kinds)}: "
        f"{len(found) - len(verdict.refused)} accepted, {len(verdict.refused)} not"
    )
    return 1 if verdict.refused else 0


def _made(kind: str) -> Golden:
    module, function = KINDS[kind]
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    found: Golden = getattr(importlib.import_module(module), function)()
    wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
    print(f"{kind}: {len(found)} cases, {wall:.0f} s, {cpu:.0f} s of CPU", file=sys.stderr, flush=True)
    return found


def _can_make(kind: str) -> bool:
    if kind != "proofs":
        return True
    from tests.golden.kind_commands import can_make_proofs

    missing = can_make_proofs()
    if missing:
        print(f"proofs: left out, {missing}", file=sys.stderr)
    return not missing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
