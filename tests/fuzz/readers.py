"""Every reader of what a user gives, with valid inputs to start from, and what is then done with what was read."""

import contextlib
import gzip
import io
import json
import random
import shlex
import struct
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from meshwright.accuracy.cases import cases_of, training_case
from meshwright.accuracy.records import read_records
from meshwright.algebra.schedules.file import format_schedule, read_schedule
from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.calculators.sharding.parsing import parse_asked
from meshwright.cli.fields import dim_sizes, job_of, parse_fields, parse_mesh, split_values, take_axes, with_fields
from meshwright.cli.group import VerbGroup
from meshwright.cli.main import cli
from meshwright.cli.sweeps.fields import read_fields, sweep_clusters
from meshwright.cli.verbs.schedule import read_times
from meshwright.core.toml_file import dump_toml, load_toml
from meshwright.core.units import parse_bytes, parse_count
from meshwright.nn.hf.files import Entry, write_checkpoint
from meshwright.nn.hf.tokenizer import end_token, read_tokenizer
from meshwright.plan.plan_file import load_plan
from meshwright.serve.model_folder import open_model
from meshwright.spec.assumptions import AS_RUN
from meshwright.spec.calibration import load_calibration
from meshwright.spec.catalogue import entry, load_model, models
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster, read_cluster
from meshwright.spec.efficiency import FittedNumbers, fitted_numbers
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.job import parse_batch
from meshwright.spec.strategy import Strategy
from meshwright.spec.weights import num_params
from meshwright.train.data.text import read_pieces
from meshwright.train.data.tokenizer import train_tokenizer
from meshwright.train.settings import settings_from_table
from tests.fuzz.binary import BINARY, read_tensors
from tests.fuzz.mutations import PIECES, json_bytes, mutated_text, mutated_tree, of_texts, of_trees, toml_bytes

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "golden" / "fixtures"
PLANNED = ("plan", "tiny", "--on", "v5e:2x2", "--batch", "8seq", "--seq", "64", "--top", "1")
PRICED = (*PLANNED[:3], "cpu:4", *PLANNED[4:], "--calibration")
QUESTIONS = (
    "",
    "--why-not tensor=2,remat=block",
    "--what-if network=0.1x,chip.flops=2x",
    "--pareto",
    "--recipe",
    "--axes fsdp=4",
)
MESH = ("--mesh", "data=4,tensor=4")
SLOW_VERBS = ("train", "bench", "profile", "verify", "generate", "demo", "launch", "convert", "accuracy")
"""Verbs that compile or train, or predict a thousand records."""
WEIGHT_NAMES = ("model.embed_tokens.weight", "model.norm.weight")


class Reader(NamedTuple):
    """Makes an input and reads it; an input is bytes of the file ``name``, or a text, or words of a command line."""

    make: Callable[[random.Random], Any]
    read: Callable[[Any, Path], object]
    share: int = 10
    """Weight among all readers."""


def call(*words: str) -> None:
    """Runs a verb without its last resort, so that every error is seen."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main(args=list(words), prog_name="meshwright", standalone_mode=False)


def of_file(
    name: str, make: Callable[[random.Random], bytes], read: Callable[[Path], object], share: int = 10
) -> Reader:
    """A reader of a file of this name."""

    def opened(data: bytes, folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return Reader(make, opened, share)


def of_words(texts: Sequence[str], read: Callable[[str], object], share: int = 10) -> Reader:
    """A reader of a text."""
    return Reader(lambda rng: mutated_text(rng.choice(texts), rng), lambda text, folder: read(text), share)


def readers(folder: Path) -> dict[str, Reader]:
    """Every reader by name; ``folder`` is for files that some start from."""
    configs = [entry(name).config for name in models()]
    chips = [{"chip": {"base": name, "hbm_bytes": 1e10, "hop_s": 1}, "shape": [4, 4]} for name in ("v5e", "h100")]
    clusters = [
        *chips,
        {"chip": "v5p", "shape": [4, 4, 8], "num_slices": 2, "twisted": False},
        {
            "chip": "h100",
            "levels": [{"size": 8, "bytes_per_s": 1e11}, {"size": 4, "hop_s": 1e-6, "oversubscription": 2.0}],
        },
    ]
    plan = tomllib.loads((FIXTURES / "plan.toml").read_text())
    rates = [tomllib.loads((FIXTURES / name).read_text()) for name in ("rates.toml", "cpu-8.toml")]
    programs = [path.read_text() for path in sorted((ROOT / "tests/data/hlo").glob("*.hlo"))]
    schedules = [
        format_schedule(build(name, stages=4, microbatches=8)) for name in ("1f1b", "gpipe", "zb-h1", "dualpipe")
    ]
    published = (ROOT / "benchmarks/data/published_training.jsonl").read_text().splitlines()[::40]
    documents = [json.dumps({"text": f"line {n}", "id": n}) for n in range(5)]
    model = _model_folder(folder / "seed")
    tokens = (model / "tokenizer.json").read_text()
    sets = [
        *(f"model.{name}={_toml(value)}" for name, value in _builtins(load_model("qwen3-30b-a3b")).items()),
        *(f"strategy.{name}={_toml(value)}" for name, value in _builtins(Strategy(mesh={"data": 1})).items()),
        *("job.optimizer=muon", "job.kind=decode", "assumptions.imbalance=1.5", "strategy.zero=1", "strategy.tensor=2"),
    ]
    trained = {"steps": 3, "track": "wandb", "learning_rate": 1e-3, "average": 0.9, "beta1": 0.8, "optimizer": "lion"}
    weight_map = dict.fromkeys(WEIGHT_NAMES, "model.safetensors")
    return {
        "config.json": of_file(
            "m/config.json", of_trees(configs, json_bytes), lambda path: num_params(model_from_config(path)), 25
        ),
        "show config": of_file("m/config.json", of_trees(configs, json_bytes), partial(_called, "show"), 5),
        "cluster": of_file("c.toml", of_trees(clusters, toml_bytes), read_cluster, 15),
        "show cluster": of_file("c.toml", of_trees(clusters, toml_bytes), partial(_called, "show"), 3),
        "plan": of_file("p.toml", of_trees([plan], toml_bytes), load_plan, 15),
        "explain": of_file("p.toml", of_trees([plan], toml_bytes), partial(_called, "explain"), 4),
        "calibration": of_file("r.toml", of_trees(rates, toml_bytes), load_calibration, 15),
        "priced": of_file("r.toml", of_trees(rates, toml_bytes), partial(_called, *PRICED), 2),
        "numbers": of_file(
            "n.toml",
            of_trees([_builtins(fitted_numbers())], toml_bytes),
            lambda path: load_toml(path, FittedNumbers),
            5,
        ),
        "hlo": of_file("p.hlo", of_texts(programs), partial(_called, "hlo"), 6),
        "hlo graph": of_file(
            "p.hlo", of_texts(programs), lambda path: call("hlo", str(path), *MESH, "--png", f"{path}.json"), 3
        ),
        "schedule": of_file("s.txt", of_texts(schedules), lambda path: tick_tables(read_schedule(path)), 10),
        "show schedule": of_file("s.txt", of_texts(schedules), partial(_called, "schedule", "--table"), 5),
        "records": of_file("r.jsonl", _lines(published), lambda path: cases_of(read_records(path), training_case), 10),
        "documents": of_file("d.jsonl", _lines(documents), _documents, 10),
        "packed": of_file("d.jsonl.gz", lambda rng: gzip.compress(_lines(documents)(rng)), _documents, 5),
        "damaged": of_file("d.jsonl.gz", of_texts(["\n".join(documents)]), _documents, 3),
        "text": of_file("d.txt", of_texts(["\n".join(documents)]), _documents, 3),
        "safetensors": of_file("w/model.safetensors", _header(model), read_tensors, 10),
        "index": of_file(
            "w/model.safetensors.index.json",
            of_trees([{"metadata": {"total_size": 128}, "weight_map": weight_map}], json_bytes),
            read_tensors,
            5,
        ),
        "tokenizer": of_file(
            "t/tokenizer.json",
            of_trees([json.loads(tokens)], json_bytes),
            lambda path: end_token(read_tokenizer(path), None),
            5,
        ),
        "model folder": of_file(
            f"{model}/generation_config.json",
            of_trees([{"eos_token_id": [1, 2]}], json_bytes),
            lambda path: open_model(path.parent),
        ),
        "cluster text": of_words(
            ["v5p:16x20x28", "4*v5e:16x16", "v4p:4x4x8_twisted", "h100:8x2x192x8"], parse_cluster, 10
        ),
        "clusters": of_words(["h100:8x1..8x512", "v5p:4x4x4..16x16x16,v5e:4x4"], sweep_clusters),
        "sizes": of_words(["4Mi", "15T", "1e6", "4096", "80 GB", "16 GiB", "1024seq"], _sizes),
        "shard": of_words(["In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]", "A[I_{X,Y}, J]{U_Z} -> A[I,J_Z]"], _asked),
        "mesh": of_words(["X=4,Y=2", "B=1024,D=4096,F=16Ki"], lambda text: (parse_mesh(text), dim_sizes(text))),
        "values": of_words(
            ["B=1..4096", "offload=[],[optimizer]", "batch=1Mi,4Mi"], partial(split_values, what="sweep")
        ),
        "sweep": of_words(
            ["batch=4Mi", "micro=1,2", "tensor=1,2,4", "remat=block,full", "seq_len=4Ki"],
            lambda text: read_fields("tiny", "v5e:2x2", [text, "batch=4Mi"]),
        ),
        "times": of_words(
            ["1.2ms", "1,1,1.5", "3", "2us,4us"],
            lambda text: read_times(forward=text, backward=None, weight=None, send="0"),
        ),
        "set": of_words(sets, _set, 25),
        "planned": of_words(sets, lambda text: call(*PLANNED, "--set", text), 3),
        "train": Reader(lambda rng: mutated_tree(trained, rng), lambda tree, folder: settings_from_table(tree)),
        "command": Reader(_command, lambda words, folder: call(*words), 12),
        **{name: of_file(file, make(folder), read, 5) for name, (file, make, read) in BINARY.items()},
    }


# -- what is done with an input --------------------------------------------------------------------------


def _called(*words_and_path: Any) -> None:
    call(*map(str, words_and_path))


def _documents(path: Path) -> None:
    for _ in read_pieces(path, "text"):
        pass


def _sizes(text: str) -> None:
    for read in (parse_count, parse_bytes, partial(parse_batch, seq_len=512)):
        with contextlib.suppress(ValueError):
            read(text)  # type: ignore[operator]


def _asked(text: str) -> None:
    parse_asked(text, dtype="bf16")
    call("shard", text, "--mesh", "X=4,Y=2,Z=2", "--dims", "B=64,D=64,F=64,I=64,J=64", "--on", "v5e:4x4")


def _set(text: str) -> None:
    fields = parse_fields([text])
    for name in ("tiny", "qwen3-30b-a3b", "deepseek-v2-lite"):
        with_fields(load_model(name), "model", fields["model"])
    job_of("8seq", 64, fields["job"])
    with_fields(AS_RUN, "assumptions", fields["assumptions"])
    take_axes(None, fields["strategy"])
    with_fields(Strategy(mesh={"data": 1}), "strategy", fields["strategy"])


# -- what they start from --------------------------------------------------------------------------------


def _builtins(value: Any) -> Any:
    return tomllib.loads(dump_toml(value))


def _toml(value: Any) -> str:
    return dump_toml({"v": value}).partition(" = ")[2].strip() or "{}"


def _lines(lines: Sequence[str]) -> Callable[[random.Random], bytes]:
    trees, texts = [json.loads(line) for line in lines], of_texts(["\n".join(lines)])
    changed = of_trees(trees, json_bytes)

    def make(rng: random.Random) -> bytes:
        return b"\n".join([lines[0].encode(), changed(rng)]) if rng.random() < 0.8 else texts(rng)

    return make


def _model_folder(folder: Path) -> Path:
    """A folder with a tiny model's files as they are published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entry("tiny").config))
    train_tokenizer(["a few words, and a few more words"] * 4, vocab_size=300).save(str(folder / "tokenizer.json"))
    entries = [Entry(name, (4, 4), np.dtype(np.float32), lambda: np.zeros((4, 4), np.float32)) for name in WEIGHT_NAMES]
    write_checkpoint(folder, entries, max_bytes=10**9)
    return folder


def _header(folder: Path) -> Callable[[random.Random], bytes]:
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    trees = of_trees([json.loads(data[8 : 8 + size])], json_bytes)

    def make(rng: random.Random) -> bytes:
        head = trees(rng)
        told = len(head) if rng.random() < 0.9 else rng.choice((0, 2**63, 10**6, size))
        return struct.pack("<Q", told) + head + data[8 + size :]

    return make


def _commands() -> list[list[str]]:
    lines = (ROOT / "tests/golden/cases/commands.txt").read_text().splitlines()
    found = [shlex.split(line.partition(" | ")[2]) for line in lines if " | " in line]
    quick = [words for words in found if words[0] not in (*SLOW_VERBS, "plan", "explain", "hlo", "sweep")]
    quick += [[*PLANNED, *shlex.split(more)] for more in QUESTIONS]
    quick += [["sweep", "tiny", "--on", "h100:8x1..8x2", *fields] for fields in (["batch=64Ki"], ["micro=1", "remat"])]
    return [words for words in quick if not any(word.startswith("tests/") or word.endswith(".toml") for word in words)]


def _command(rng: random.Random) -> list[str]:
    """A command line with one or two words changed, and no file or picture to write."""
    words = list(rng.choice(_COMMANDS))
    if rng.random() < 0.5:
        words += _option(words, rng)
    for _ in range(rng.randint(0 if words[-1] in HOSTILE_WORDS else 1, 2)):
        at = rng.randrange(1, len(words)) if len(words) > 1 else 0
        if at and words[at] not in ("--png", "--frames", "--page", "--out"):
            words[at] = mutated_text(words[at], rng)
    kept = [word for at, word in enumerate(words) if not {word, *words[max(0, at - 1) : at]} & _WRITING]
    return [word.replace("\0", "") for word in kept]


def _option(words: Sequence[str], rng: random.Random) -> list[str]:
    """An option of the verb with a hostile value."""
    verb = cli.get_command(click.Context(cli), words[0])
    if isinstance(verb, VerbGroup):
        verb = verb.get_command(click.Context(verb), words[1] if words[1] in verb.verbs else verb.otherwise)
    taken = [one for one in (verb.params if verb else ()) if isinstance(one, click.Option) and not one.is_flag]
    options = [one for one in taken if not isinstance(one.type, click.Path)]
    return [rng.choice(options).opts[0], rng.choice(HOSTILE_WORDS)] if options else []


HOSTILE_WORDS = (
    *PIECES,
    "0.5",
    "1e-9",
    "3",
    "7",
    "1000",
    "1e6",
    "1e15",
    "1e30",
    "4Mi",
    "1G",
    "X=1e9",
    "B=1..1e18",
    "v5e",
    "tiny",
)
_WRITING = {"--png", "--frames", "--page", "--out", "-o"}
_COMMANDS = _commands()
assert chip("v5e")
