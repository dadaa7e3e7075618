"""Tokens, labels and the loss of chats beside those of TRL's SFTTrainer, which runs in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from meshwright.algebra.layers import ProgramOptions
from meshwright.parallel.train_step import TrainStep
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.data.rows import RowPart
from meshwright.train.settings import TrainSettings
from meshwright.train.weights import save_weights
from tests.train.data.chats import FORMS, TEMPLATES, write_records, write_tokenizer
from tests.train.small import MODEL, strategy

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: make torch"),
]
LONG, CUT, MOST_ROWS = 192, 36, 6
CASES = [
    *((name, "messages", "completion", LONG) for name in TEMPLATES),
    *((name, "messages", "assistant", LONG) for name in TEMPLATES),
    *((name, "pairs", "completion", LONG) for name in TEMPLATES),
    ("qwen", "pairs", "assistant", LONG),
    ("gemma", "pairs", "all", LONG),
    ("llama", "plain", "completion", LONG),
    ("qwen", "tools", "assistant", LONG),
    ("qwen", "kwargs", "completion", LONG),
    ("llama", "messages", "assistant", CUT),  # cuts what some answer
]
TRL = """
import json, os, sys
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import torch, transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
folder, cases = sys.argv[1], json.loads(sys.argv[2])
found = []
for name, form, loss_on, seq_len in cases:
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/{name}")
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    with open(f"{folder}/{form}.jsonl") as lines:
        records = [json.loads(line) for line in lines]
    config = SFTConfig(
        output_dir=f"{folder}/out", max_length=seq_len, per_device_train_batch_size=64, report_to=[],
        assistant_only_loss=loss_on == "assistant", completion_only_loss=False if loss_on == "all" else None,
        use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
    )
    data = Dataset.from_list(records)
    trainer = SFTTrainer(model=model, args=config, processing_class=tokenizer, train_dataset=data)
    rows = [{name: one[name] for name in ("input_ids", "labels")} for one in trainer.train_dataset]
    batch = trainer.data_collator(rows)
    counted = sum(label != -100 for row in rows for label in row["labels"][1:])
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(counted))
    found.append({"rows": rows, "loss": float(loss)})
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    for name, template in TEMPLATES.items():
        write_tokenizer(folder / name, template)
    for form, records in FORMS.items():
        write_records(folder / f"{form}.jsonl", records)
    (folder / "model").mkdir()
    params = TrainStep(MODEL, strategy()).init(0).params
    save_weights(MODEL, params, folder / "model")
    return folder


@pytest.fixture(scope="module")
def trl(folder):
    given = json.dumps(CASES)
    done = subprocess.run(
        [sys.executable, "-c", TRL, str(folder), given], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.rpartition("FOUND")[2]), strict=True))


def rows_of(folder, case, seq_len, *, packing):
    name, form, loss_on, _ = case
    given = TrainSettings(
        data=str(folder / f"{form}.jsonl"), tokenizer=str(folder / name), loss_on=loss_on, held_out=0.0, packing=packing
    )
    data = open_data(given, vocab_size=MODEL.vocab_size, folder=folder / "tokens")
    (samples,) = Batches(data.train, batch_seqs=1, seq_len=seq_len, seed=0).samples
    return [samples.rows.read(number, np.arange(seq_len)) for number in range(len(samples.rows))]


@cache
def step_of(documents):
    step = TrainStep(MODEL, strategy(), options=ProgramOptions(documents=documents))
    return step, step.init(0).params


def loss_of(rows, *, documents):
    """The loss of rows as one batch, filled to `MOST_ROWS` by rows without a label: one shape is compiled once."""
    step, params = step_of(documents)
    empty = [RowPart(*(np.full_like(rows[0].tokens, value) for value in (0, -1, 0, 0)))] * (MOST_ROWS - len(rows))
    batch = dict(zip(RowPart._fields, map(np.stack, zip(*rows, *empty, strict=True)), strict=True))
    return float(step.gradients(params, step.place(batch))[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_tokens_labels_and_the_loss_are_those_of_trl(folder, trl, case):
    expected, seq_len = trl[case]["rows"], case[3]
    rows = rows_of(folder, case, seq_len, packing=False)
    assert len(rows) == len(expected)
    for row, theirs in zip(rows, expected, strict=True):
        size = len(theirs["input_ids"])
        assert row.tokens[:size].tolist() == theirs["input_ids"]
        assert not row.tokens[size:].any()
        assert row.labels.tolist() == [max(one, -1) for one in theirs["labels"][1:]] + [-1] * (seq_len + 1 - size)
    assert loss_of(rows, documents=False) == pytest.approx(trl[case]["loss"], rel=2e-6)
    if seq_len != CUT:
        packed = rows_of(folder, case, 2 * seq_len, packing=True)
        assert len(packed) < len(rows)
        assert loss_of(packed, documents=True) == pytest.approx(trl[case]["loss"], rel=2e-6)
