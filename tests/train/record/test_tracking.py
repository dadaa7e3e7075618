"""What trackers are sent; Weights & Biases by a stand-in, since it is not installed here."""

import sys
import types

import pytest

from meshwright.core.errors import InputError
from meshwright.train.record.metrics import EvaluationRecord
from meshwright.train.record.tracking import Tracking, require_trackers
from tests.train.event_files import scalars
from tests.train.record.test_run_folder import RECORD

EVALUATED = EvaluationRecord(step=3, tokens=300, loss=2.75)


def test_tensorboard(tmp_path):
    with Tracking(("tensorboard",), tmp_path, {}) as tracking:
        tracking.record(RECORD)
        tracking.evaluated(EVALUATED)
    found = scalars(tmp_path / "tensorboard")
    assert found["loss", 3] == RECORD.loss
    assert found["tokens_per_s", 3] == RECORD.tokens_per_s
    assert found["evaluation_loss", 3] == 2.75
    assert ("hfu", 3) not in found  # not known


def test_weights_and_biases(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("end")
    )
    stand_in = types.SimpleNamespace(init=lambda **given: calls.append(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with Tracking(("wandb",), tmp_path / "tiny-001", {"train": {"steps": 9}}) as tracking:
        tracking.record(RECORD)
        tracking.evaluated(EVALUATED)
    given, (step, numbers), evaluated, end = calls[:4]
    assert given["name"] == "tiny-001"
    assert given["resume"] == "allow"
    with Tracking(("wandb",), tmp_path / "tiny-001", {}):
        pass
    with Tracking(("wandb",), tmp_path / "elsewhere" / "tiny-001", {}):
        pass
    first, again, other = (call["id"] for call in calls if isinstance(call, dict))
    assert first == again != other, "a resumed run goes on in its own, and one of the same name elsewhere does not"
    assert given["config"] == {"train": {"steps": 9}}
    assert (step, numbers["loss"]) == (3, RECORD.loss)
    assert evaluated == (3, {"evaluation_loss": 2.75})
    assert end == "end"


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package_is_one_line_before_anything_is_written(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs {package}: pip install 'meshwright\[{name}\]'") as caught:
        require_trackers((name,))
    assert "\n" not in str(caught.value)
    require_trackers(())
