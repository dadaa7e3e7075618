"""Runs the membership service: ``python -m meshwright.islands HOST:PORT BOUNDS``, where bounds are JSON."""

import asyncio
import os
import sys
from contextlib import suppress

import msgspec

from meshwright.islands.member import KEY
from meshwright.islands.messages import host_and_port
from meshwright.islands.service import Bounds, Membership


def main(address: str, bounds: str = '{"count": 1}', quiet: str = "") -> None:
    """Serves at an address until interrupted; prints each change to standard error if ``quiet`` is ""."""
    service = Membership(
        msgspec.json.decode(bounds, type=Bounds),
        key=os.environ.get(KEY, ""),
        say=lambda line: print(line, file=sys.stderr, flush=True) if quiet == "" else None,
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(service.serve(*host_and_port(address)))


if __name__ == "__main__":
    main(*sys.argv[1:])
