"""The runner of console blocks: it finds them, runs them, and sees a difference."""

import pytest

from tests.blocks import printed, read_sections, run_section
from tests.refresh_blocks import refreshed

PAGE = """# One

```json own.json
{"a": 1}
```

```console
$ meshwright roofline "bf16[B,D] * bf16[D,F] -> bf16[B,F]" \\
    --dims B=1,D=1024,F=1024 --on v5e | grep "bound by"
old words
$ meshwright show nothing
```

## Two

```text
# no heading
```

No blocks here.

## Three

```console
$ meshwright --version
```
"""


def test_sections_and_calls():
    one, three = read_sections(PAGE)
    assert (one.title, three.title) == ("One", "Three")
    assert one.files == {"own.json": '{"a": 1}\n'}
    assert [call.said for call in one.calls] == ["old words", ""]


def test_a_run_prints_what_is_so_now(tmp_path):
    one, _ = read_sections(PAGE)
    bound, refused = run_section(one, tmp_path)
    assert bound == "bound by          hbm: 0.9981 FLOPs/byte, compute-bound from 240.5"
    assert refused.startswith("meshwright: 'nothing' is no model, chip or cluster.")
    assert (tmp_path / "own.json").exists()


def test_refreshing_writes_it_in_and_leaves_the_rest():
    new = refreshed(PAGE)
    assert "old words" not in new
    assert read_sections(new)[0].calls[0].said == "bound by          hbm: 0.9981 FLOPs/byte, compute-bound from 240.5"
    assert refreshed(new) == new
    assert new.split("## Two")[1].split("## Three")[0] == PAGE.split("## Two")[1].split("## Three")[0]


@pytest.mark.parametrize(
    "command", ["ls", "meshwright show v5e | rm x", "meshwright show v5e | grep nowhere-to-be-found"]
)
def test_what_is_not_run(command):
    with pytest.raises(AssertionError, match=command.split()[0]):
        printed(command)
