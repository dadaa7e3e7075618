"""The plan file: whole, versioned, and with a line for every fault."""

import re

import msgspec
import pytest

from meshwright.core.errors import InputError
from meshwright.core.toml_file import dump_toml, parse_toml
from meshwright.plan.plan_file import Plan, decode_plan, load_plan, save_plan
from meshwright.spec import catalogue
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration, CollectiveRate, datasheet_calibration
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

PREDICTED = Prediction(
    step_s=1.5,
    step_s_lower=1.25,
    step_s_upper=1e-7,
    mfu=0.1 + 0.2,
    hfu=0.5,
    bound_by="ici",
    hbm_bytes_per_chip=2.5e10,
    memory={"weights": 1e9, "kv_cache": 0.0},
    flops=4.2e18,
    terms={"matmul": 1.0, "fsdp,context": 0.25},
    train_days=44.0,
)


def parse_plan(text: str, *, path: str = "<text>") -> Plan:
    return decode_plan(parse_toml(text, path=path))


def make(cluster="v5p:16x20x28", model="llama3.1-70b", calibration=None, assumptions=AS_RUN, **fields):
    laid = parse_cluster(cluster)
    mesh = make_mesh({"data": 35, "fsdp": 32, "context": 2, "tensor": 4})
    strategy = Strategy(mesh=mesh, placement={"data": "5 of y (20) x 7 of z (28)", "tensor": "z (4)"}, **fields)
    return Plan(
        model=catalogue.load_model(model),
        cluster=laid,
        job=Job(batch_seqs=1120, seq_len=4096, train_tokens=15 * 10**12),
        strategy=strategy,
        assumptions=assumptions,
        calibration=calibration or datasheet_calibration(laid.chip),
        predicted=PREDICTED,
    )


MEASURED = Calibration(
    name="this machine",
    chip="cpu",
    machine='a "quoted" name',
    date="2025-01-31",
    matmul_flops_per_s={"fp32": 1.5e10},
    memory_bytes_per_s=3e9,
    collectives=(CollectiveRate(kind="all_gather", group_size=8, latency_s=1e-4, bytes_per_s=1e9),),
    hop_s={"host": 1e-6},
    sources={"memory_bytes_per_s": "measured"},
)


@pytest.mark.parametrize(
    "plan",
    [
        make(),
        make("4*v5e:16x16", "llama3-8b", remat=("qr", "kr"), num_microbatches=4),
        make("h100:8x256", "tiny", state="fp32", slice_axes=("fsdp",)),
        make("cpu:8", "tiny", calibration=MEASURED),
        make(
            assignment=standard_assignment(zero=1),
            context_attention="ring",
            remat="every-4",
            schedule="interleaved",
            chunks=4,
            state="bf16-master",
            precision="fp8",
            offload=("optimizer", "activations"),
            capacity_factor=1.25,
            assumptions=Assumptions(imbalance=1.25),
        ),
    ],
    ids=["torus", "slices", "switched", "measured", "every field"],
)
def test_round_trip(plan, tmp_path):
    path = tmp_path / "deep" / "plan.toml"
    save_plan(plan, path)
    read = load_plan(path)
    assert read == plan
    assert list(read.strategy.mesh) == ["pipeline", "data", "fsdp", "expert", "context", "tensor"]


def test_it_needs_no_other_file():
    """Everything that the catalogues gave is inside: figures of the chip, sizes of the model, and their sources."""
    text = dump_toml(make())
    for line in ('name = "llama3.1-70b"', "d_model = 8192", "ici_link_bytes_per_s", "[cluster.chip.sources]"):
        assert line in text


def test_writing_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "plan.toml"
    save_plan(make(), path)
    before = path.read_text()
    monkeypatch.setattr("meshwright.core.files.os.replace", _full_disk)
    with pytest.raises(OSError, match="no space"):
        save_plan(make(remat="none"), path)
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]


def _full_disk(source, target):
    raise OSError("no space left")


def test_the_file_is_readable_like_any_other(tmp_path):
    plain, saved = tmp_path / "plain", tmp_path / "plan.toml"
    plain.write_text("")
    save_plan(make(), saved)
    assert saved.stat().st_mode == plain.stat().st_mode


def faulty(old, new):
    text = dump_toml(make())
    assert old in text
    number = text[: text.index(old)].count("\n") + 1
    with pytest.raises(InputError) as raised:
        parse_plan(text.replace(old, new, 1), path="plan.toml")
    message = str(raised.value)
    assert "\n" not in message
    return number, message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version = 2", "version = 3", "plan version 3 is not known; this meshwright reads version 2"),
        (
            "num_microbatches = 1",
            "num_microbatch = 1",
            "num_microbatch is not a field. Did you mean 'num_microbatches'?",
        ),
        ("num_microbatches = 1", 'num_microbatches = "1"', "num_microbatches"),
        ("seq_len = 4096", "seq_len = 4096.5", "seq_len"),
        ("mfu = 0.3", 'mfu = "fast" # 0.3', "mfu"),
        ('context_attention = "gather"', 'context_attention = "rings"', "context_attention"),
        ("fsdp = ", "fspd = ", "'fspd' is no mesh axis. Did you mean 'fsdp'?"),
        ('N = [\n    "tensor"', 'N = [\n    "tensr"', "'tensr' is no mesh axis. Did you mean 'tensor'?"),
        ("N = [", "Nx = [", "'Nx' is no dim. Did you mean 'N'?"),
        ("chunks = 1", "chunk = 1", "strategy.chunk is not a field. Did you mean 'chunks'?"),
    ],
)
def test_faults_have_a_line_and_a_remedy(old, new, words):
    number, message = faulty(old, new)
    assert message.startswith(f"plan.toml:{number}: ")
    assert words in message


def test_values_that_no_plan_has():
    _, message = faulty('remat = "block"', 'remat = "blok"')
    assert "Did you mean 'block'?" in message
    assert message.startswith("plan.toml:")
    _, message = faulty("mfu = 0.3", "mfu = -0.3")
    assert "predicted mfu is -0.3, give a number of at least 0." in message
    _, message = faulty("chunks = 1", "chunks = 0")
    assert "strategy.chunks=0 must be at least 1." in message
    _, message = faulty("batch_seqs = 1120", "batch_seqs = 0")
    assert "job.batch_seqs=0 must be between 1 and" in message
    _, message = faulty('\nchip = "v5p"', '\nchip = "v5e"')
    assert "the rates are of v5e, but the chips are v5p. Give rates of v5p." in message


def test_a_file_that_is_no_plan(tmp_path):
    with pytest.raises(InputError, match="not a plan file: it has no version"):
        parse_plan("shape = [4, 4]\n", path="cluster.toml")
    with pytest.raises(InputError, match=r"cannot be read \(No such"):
        load_plan(tmp_path / "missing.toml")
    with pytest.raises(InputError, match=r"plan\.toml:2: not valid TOML"):
        parse_plan("version = 1\n[model\n", path="plan.toml")
    tables = ("model", "cluster", "calibration", "job", "strategy", "predicted")
    with pytest.raises(InputError, match=f"^plan.toml: needs the fields {', '.join(map(repr, tables))}.$"):
        parse_plan("version = 1\n", path="plan.toml")
    empty = "".join(f"[{name}]\n" for name in tables)
    with pytest.raises(InputError, match=r"^plan.toml:2: .* 'model.name', .*; plan.toml:7: .* 'predicted.flops'.$"):
        parse_plan(f"version = 1\n{empty}", path="plan.toml")


def test_utilisation_is_flops_over_time_and_peak():
    """Twice as long is half of it, whatever FLOPs and peak: those of the prediction."""
    slow = msgspec.structs.replace(PREDICTED, step_s=0.06, mfu=1.0, hfu=1.2, mfu_causal=0.8)
    assert slow.measured(0.12) == pytest.approx({"mfu": 0.5, "hfu": 0.6, "mfu_causal": 0.4})
    assert slow.measured(slow.step_s) == {"mfu": 1.0, "hfu": 1.2, "mfu_causal": 0.8}
    older = msgspec.structs.replace(slow, mfu_causal=None)
    assert older.measured(0.12) == pytest.approx({"mfu": 0.5, "hfu": 0.6, "mfu_causal": None})


# -- assumptions ------------------------------------------------------------------------------------------


def test_assumptions_have_a_table_of_their_own():
    plan = make(assumptions=Assumptions(software="eager", imbalance=1.5))
    text = dump_toml(plan)
    assert text.partition("[assumptions]")[2].lstrip().startswith('software = "eager"\nattention_kernel = "tuned"\n')
    assert parse_plan(text) == plan


def test_a_file_from_before_has_them_in_the_strategy():
    plan = make(assumptions=Assumptions(software="eager", attention_kernel="portable", imbalance=1.5))
    assert parse_plan(older(plan)) == plan
    some = older(make()).replace('software = "compiled"\n', "").replace("imbalance = 1.0", "imbalance = 2.0")
    assert parse_plan(some).assumptions == Assumptions(imbalance=2.0)


def test_an_imbalance_was_a_bound_on_slots_once():
    text = dump_toml(make(assumptions=Assumptions(imbalance=1.5)))
    assert parse_plan(text).strategy.capacity_factor == 0
    assert parse_plan(text.replace("capacity_factor = 0.0\n", "")).strategy.capacity_factor == 1.5
    plain = dump_toml(make()).replace("capacity_factor = 0.0\n", "")
    assert parse_plan(plain) == make()


def older(plan):
    """The text as it was written before assumptions had a table."""
    before, table, after = dump_toml(plan).partition("[assumptions]\n")
    fields, gap, rest = after.partition("\n\n")
    assert table
    assert gap
    return f"{before.rstrip()}\n\n{rest}".replace("[strategy]\n", f"[strategy]\n{fields}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda: older(make()).replace('"compiled"', '"compild"'), r"<text>:\d+: assumptions\.software is 'compild'\."),
        (
            lambda: dump_toml(make()).replace("[strategy]\n", '[strategy]\nsoftware = "eager"\n'),
            r"<text>:\d+: strategy\.software is not a field\.",
        ),
        (
            lambda: dump_toml(make()).replace("[assumptions]\n", "[assumptions]\nsoftwares = 1\n"),
            r"<text>:\d+: assumptions\.softwares is not a field\. Did you mean 'software'\?$",
        ),
    ],
    ids=["a wrong word", "in both places", "an unknown field"],
)
def test_a_wrong_assumption_is_said_in_one_line(text, words):
    written = text()
    with pytest.raises(InputError) as raised:
        parse_plan(written)
    assert re.match(words, str(raised.value))
    assert "\n" not in str(raised.value)
    line = int(str(raised.value).split(":")[1])
    assert "software" in written.splitlines()[line - 1]


def test_a_word_that_is_not_known_comes_with_those_that_are():
    text = dump_toml(make()).replace('topology = "torus"', 'topology = "donut"')
    with pytest.raises(InputError, match=r"cluster.chip.topology is 'donut'. Give torus, switched or host."):
        parse_plan(text)
