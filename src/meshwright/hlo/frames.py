"""The tables of source lines at the head of an HLO module, and the stack that an instruction points into them with."""

import re
from collections.abc import Mapping, Sequence

import msgspec

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NAME = re.compile(r'^(\d+) "(.*)"\s*$')
_ROW = re.compile(r"^(\d+) \{(.*)\}\s*$")
_FIELD = re.compile(r"(\w+)=(\d+)")


class Frame(msgspec.Struct, frozen=True):
    """One line of Python source."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


class Frames(msgspec.Struct, frozen=True):
    """Frame by number, and the number of the frame that called it (0: none)."""

    frames: Mapping[int, Frame]
    parents: Mapping[int, int]

    def stack(self, number: int) -> tuple[Frame, ...]:
        """The frame of this number and its callers, innermost first."""
        found, seen = [], set[int]()
        while number in self.frames and number not in seen:
            seen.add(number)
            found.append(self.frames[number])
            number = self.parents[number]
        return tuple(found)


def read_frames(lines: Sequence[str]) -> Frames:
    """The frames of a module; none where it has no tables."""
    names: dict[str, dict[int, str]] = {table: {} for table in _TABLES[:2]}
    rows: dict[str, dict[int, dict[str, int]]] = {table: {} for table in _TABLES[2:]}
    table = ""
    for line in lines:
        if line.startswith(("%", "ENTRY")):
            break
        if line in _TABLES:
            table = line
        elif table in names and (name := _NAME.match(line)):
            names[table][int(name[1])] = name[2]
        elif table in rows and (row := _ROW.match(line)):
            rows[table][int(row[1])] = {key: int(value) for key, value in _FIELD.findall(row[2])}
    return _frames(names["FileNames"], names["FunctionNames"], rows["FileLocations"], rows["StackFrames"])


def _frames(
    files: Mapping[int, str],
    functions: Mapping[int, str],
    locations: Mapping[int, Mapping[str, int]],
    stack: Mapping[int, Mapping[str, int]],
) -> Frames:
    frames, parents = {}, {}
    for number, row in stack.items():
        place = locations.get(row.get("file_location_id", 0), {})
        frames[number] = Frame(
            file=files.get(place.get("file_name_id", 0), "?"),
            line=place.get("line", 0),
            function=functions.get(place.get("function_name_id", 0), ""),
        )
        # Parents are written one higher than the frames are numbered: 1 is none.
        parents[number] = row.get("parent_frame_id", 1) - 1
    return Frames(frames=frames, parents=parents)
