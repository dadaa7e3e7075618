import msgspec
import pytest

from meshwright.core.errors import InputError
from meshwright.train.settings import TrainSettings, settings_from_table


def test_keys_that_are_left_out_have_their_default():
    assert settings_from_table({"steps": 7}) == TrainSettings(steps=7)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"learning_rat": 1.0}, "train.learning_rat is not a field. Did you mean 'learning_rate'"),
        ({"steps": "many"}, "train.steps is 'many'. Give a whole number"),
        ({"steps": 0}, "train.steps=0 must be at least 1"),
        ({"learning_rate": -1.0}, "train.learning_rate=-1.0 must be a number above 0"),
        ({"beta2": 1.0}, "train.beta2=1.0 must be at least 0 and less than 1"),
        ({"average": 1}, "train.average=1.0 must be at least 0 and less than 1"),
        ({"outer_rate": 0.0}, "train.outer_rate=0.0 must be a number above 0"),
        ({"outer_momentum": 1.0}, "train.outer_momentum=1.0 must be at least 0 and less than 1"),
        ({"keep_checkpoints": 0}, "train.keep_checkpoints=0 must be at least 1"),
        ({"local_every": 5}, "train.local_every and train.local_folder go together"),
        ({"checkpoint_every": -1}, "train.checkpoint_every=-1 must not be negative"),
        ({"weight_decay": float("nan")}, "train.weight_decay is nan: give a finite number"),
        ({"epsilon": 0.0}, "train.epsilon=0.0 must be a number above 0"),
        ({"decay_fraction": 0.0}, "train.decay_fraction=0.0 must be above 0 and at most 1"),
        ({"schedule": "cosin"}, "train.schedule is 'cosin'. Give cosine, linear, constant, wsd or rsqrt"),
        ({"optimizer": "nonsense"}, "train.optimizer is 'nonsense'. Give adamw, adafactor, lion or muon"),
        ({"optimizer": 3}, "train.optimizer is 3. Give adamw, "),
        ({"track": ["wand"]}, "train.track.0 is 'wand'. Give "),
    ],
)
def test_bad_settings_give_one_line(table, message):
    with pytest.raises(InputError, match=message) as caught:
        settings_from_table(table)
    assert "\n" not in str(caught.value)


def test_trackers_may_be_one_text():
    for given in ("tensorboard, wandb", ["tensorboard", "wandb"]):
        assert settings_from_table({"track": given}).track == ("tensorboard", "wandb")
    assert settings_from_table({"track": ""}).track == ()


def test_words_are_checked_where_settings_are_made_in_code():
    with pytest.raises(InputError, match=r"TrainSettings.rounding is 'up'. Give nearest or stochastic"):
        TrainSettings(rounding="up")


def test_settings_come_back_from_the_table_that_a_run_saves():
    given = TrainSettings(track=("wandb",), schedule="wsd", packing=True)
    assert settings_from_table(msgspec.to_builtins(given)) == given
