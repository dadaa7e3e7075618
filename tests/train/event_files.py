"""TensorBoard's event files read back, without TensorBoard."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) -> value, of all event files of a folder."""
    found = {}
    for file in folder.iterdir():
        rest = file.read_bytes()
        while rest:
            # A record is its length, a checksum of that, the event, a checksum.
            (size,) = struct.unpack("<Q", rest[:8])
            event = Event.FromString(rest[12 : 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            rest = rest[16 + size :]
    return found
