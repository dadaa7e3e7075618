"""How far long work is: one line on a terminal that is erased, and nothing anywhere else."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from meshwright.cli import progress
from meshwright.core.progress import RunningWork, shown_by, tracked, working

PLAN = ["llama3-8b", "--on", "h100:8x1", "--batch", "8seq", "--seq", "1024"]
SHOWING = """
import sys, time
from meshwright.cli import progress, verb
from meshwright.core.progress import tracked
from meshwright.cli.output import say
from meshwright.report.answer import Answer

progress.AFTER_S, progress.EVERY_S = 0.2, 0.05

@verb.verb(verb.Options)
def command(given):
    for number in tracked(range(6), "pricing points"):
        time.sleep(0.2)
        if number == 3:
            say("a message")
    return Answer({"done": 6}, ["the answer"])

command.main(sys.argv[1:], standalone_mode=False)
"""


def on_a_terminal(*args: str, **variables: str) -> tuple[str, str]:
    """Standard output, and everything that a terminal on standard error is sent."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "CI": "", "COLUMNS": "60", **variables}
    with subprocess.Popen(
        [sys.executable, "-c", SHOWING, *args], stdout=subprocess.PIPE, stderr=follower, env=environment, text=True
    ) as process:
        os.close(follower)
        sent = b""
        try:
            while part := os.read(leader, 4096):
                sent += part
        except OSError:  # Linux ends the other side of a terminal so
            pass
        out = process.stdout.read()
    os.close(leader)
    assert process.returncode == 0
    return out, sent.decode()


def visible(sent: str) -> list[str]:
    """The lines that stay on a terminal without any escape codes."""
    lines = []
    for line in sent.replace("\r\n", "\n").split("\n"):
        screen = ""
        for text in line.split("\r"):
            screen = text + screen[len(text) :]
        lines.append(screen.rstrip())
    return lines


def test_a_line_says_how_far_work_is_and_is_erased():
    out, sent = on_a_terminal()
    assert out == "the answer\n"
    assert re.search(r"pricing points: [2-5] of 6, \d+ s, about \d+ s more", sent)
    assert visible(sent) == ["a message", ""]
    assert "\x1b" not in sent


@pytest.mark.parametrize(("args", "variables"), [(["--json"], {}), ([], {"CI": "true"})])
def test_nothing_is_shown_with_json_or_in_ci(args, variables):
    assert on_a_terminal(*args, **variables)[1] == "a message\r\n"


def test_nothing_is_shown_in_a_pipe():
    done = subprocess.run([sys.executable, "-c", SHOWING], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("the answer\n", "a message\n")


def test_programs_in_files_say_nothing_of_how_long_others_take(monkeypatch):
    """Two are read in 7 s, of four others one takes 10 s: three more take 30 s."""
    now_s = 0.0
    monkeypatch.setattr("meshwright.core.progress.perf_counter", lambda: now_s)
    work, texts = RunningWork("compiling programs", 0), []
    for now_s, done in ((1.0, 0), (7.0, 0), (17.0, 1), (27.0, 2), (47.0, 4)):
        work.at(done, 4)
        texts.append(progress.words_of(work, now_s))
    assert texts == [
        "compiling programs: 0 of 4, 1 s",
        "compiling programs: 0 of 4, 7 s",
        "compiling programs: 1 of 4, 17 s, about 30 s more",
        "compiling programs: 2 of 4, 27 s, about 20 s more",
        "compiling programs: 4 of 4, 47 s",
    ]


def test_the_hook_hears_of_outer_and_inner_work_and_of_its_end_after_an_error():
    heard = []
    with (
        shown_by(lambda running: heard.append([work.what for work in running])),
        suppress(ZeroDivisionError),
        working("outer"),
    ):
        for item in tracked([1, 0], "inner"):
            1 / item
    assert heard == [["outer"], ["outer", "inner"], ["outer"], []]
    with working("unheard") as work:
        assert (work.what, len(heard)) == ("unheard", 4)


@pytest.mark.parametrize("verb", ["show", "plan", "explain", "--help", "bad"])
def test_no_escape_codes_go_into_a_pipe_even_where_other_programs_would_write_them(verb):
    """tests/golden/test_sizes.py looks at every golden command."""
    words = {"show": ["h100"], "plan": PLAN, "explain": [*PLAN, "--axes", "tensor=8"]}.get(verb, [])
    variables = {**os.environ, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", verb, *words], capture_output=True, env=variables, check=False
    )
    assert done.stdout + done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
