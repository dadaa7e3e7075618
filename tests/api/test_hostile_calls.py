"""Every name of the front door with values of wrong types and out of range: one clear line of the package's own."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import meshwright as mw
from meshwright.algebra.generation.program import Storage
from meshwright.core.errors import CannotRunError, InputError

MODEL, CLUSTER = mw.load_model("tiny"), mw.parse_cluster("h100:8x1")
SETTING = mw.make_setting(MODEL, CLUSTER, batch="64seq", seq_len=512)
WHOLE = mw.Strategy(mesh=mw.make_mesh({"fsdp": 8}))
ALONE = mw.Strategy(mesh=mw.make_mesh({}), state="fp32")
PLAN = mw.rank_plans(SETTING, axes={"fsdp": 8}, overrides={"remat": "block"}, top=1).plans[0]
QKV = np.zeros((1, 4, 2, 8), np.float32)
SIZES = {"num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 8}


def setting(**given):
    return mw.make_setting(**{"model": MODEL, "cluster": CLUSTER, "batch": "64seq", "seq_len": 512} | given)


def model(**given):
    return mw.Model(**{"name": "toy", "family": "llama"} | SIZES | given)


def packed(**given):
    return mw.PackedStep(MODEL, ALONE, **{"max_len": 8, "max_seqs": 1, "storage": Storage(page_len=8)} | given)


CALLS = {
    "make_setting": [
        (lambda: setting(batch=1e6), "not a whole number of sequences of 512"),
        (lambda: setting(batch=float("nan")), "make_setting: batch is nan. Give a whole number or text."),
        (lambda: setting(batch=None), "batch is None. Give"),
        (lambda: setting(batch=64), "batch 64 is 64 tokens, less than one sequence of 512"),
        (lambda: setting(batch=-4), "batch '-4' is below 1"),
        (lambda: setting(batch=True), "batch is True"),
        (lambda: setting(seq_len=1.5), "seq_len is 1.5"),
        (lambda: setting(cluster=None), "cluster is None. Give text or a Cluster."),
        (lambda: setting(model=""), "model '' is neither in the catalogue"),
        (lambda: setting(calibration="/"), "Is a directory"),
        (lambda: setting(optimizer=None), "job.optimizer"),
        (lambda: setting(rows=3), "job.rows is not a field"),
    ],
    "load_calibration": [
        (lambda: mw.load_calibration("/"), "Is a directory"),
        (lambda: mw.load_calibration(3), "is 3"),
    ],
    "load_model": [(lambda: mw.load_model(None), "name is None"), (lambda: mw.load_model("/tmp/no"), "cannot be read")],
    "parse_cluster": [(lambda: mw.parse_cluster(8), "text is 8"), (lambda: mw.parse_cluster("h100:0x8"), "below 1")],
    "flex_attention": [
        (lambda: mw.flex_attention("q", QKV, QKV), "q is not an array"),
        (lambda: mw.flex_attention(QKV.astype(np.int32), QKV, QKV), "q is an array of int32"),
        (lambda: mw.flex_attention(QKV, QKV[:, :, :1], QKV), "give [B, T, N, H], [B, S, K, H] and [B, S, K, Hv]"),
        (lambda: mw.flex_attention(QKV, QKV[:, :0], QKV[:, :0]), "every dim must be at least 1"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, mask_mod="causal"), "mask_mod is 'causal'. Give a function"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, mask_mod=lambda b, q: q), "mask_mod fails: TypeError"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, mask_mod=lambda b, h, q, k: q - k), "mask_mod returns int32"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, score_mod=lambda s, b, h, q, k: s[None]), "score_mod returns"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, scale="x"), "scale is 'x'"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, sinks=QKV[0, 0, 0]), "one number for each of 2 heads"),
        (lambda: mw.flex_attention(QKV, QKV, QKV, kernel="x"), "kernel 'x' cannot run on cpu: use xla"),
    ],
    "block_table": [
        (lambda: mw.block_table("causal", q_len=8, kv_len=8), "mask is 'causal'. Give a function."),
        (lambda: mw.block_table(lambda b, h, q, k: k <= q, q_len=0, kv_len=8), "q_len=0 must be at least 1"),
        (lambda: mw.block_table(lambda b, h, q, k: k <= q, q_len=8, kv_len=8, block=(3,)), "block=(3,)"),
        (lambda: mw.block_table(lambda b, h, q, k: 3, q_len=8, kv_len=8), "the mask returns int. Return Booleans"),
        (lambda: mw.block_table(lambda b, h, q, k: q - k, q_len=8, kv_len=8), "Return Booleans"),
    ],
    "make_mesh": [
        (lambda: mw.make_mesh({"fsdp": 0}), "fsdp=0 must be at least 1"),
        (lambda: mw.make_mesh("fsdp=8"), "axes is 'fsdp=8'. Give a table {text: a whole number}."),
        (lambda: mw.make_mesh({"fsdp": "8"}), "Give a table"),
        (lambda: mw.make_mesh({"fsp": 8}), "'fsp' is not known"),
    ],
    "Job": [
        (lambda: mw.Job(batch_seqs="x", seq_len=8), "Job.batch_seqs is 'x'"),
        (lambda: mw.Job(batch_seqs=8, seq_len=8, kind=7), "Job.kind is 7"),
        (lambda: mw.Job(batch_seqs=0, seq_len=8), "must be between 1"),
    ],
    "Model": [
        (lambda: model(num_layers="a"), "Model.num_layers is 'a'"),
        (lambda: model(family="lama"), "Model.family is 'lama'"),
        (lambda: model(rope_theta=float("nan")), "rope_theta is nan"),
    ],
    "Strategy": [
        (lambda: mw.Strategy(mesh={"fsdp": 1.5}), "Strategy.mesh is {'fsdp': 1.5}"),
        (lambda: msgspec.structs.replace(WHOLE, remat=7), "Strategy.remat is 7. Give text or a list of text."),
        (lambda: msgspec.structs.replace(WHOLE, offload="optimizer"), "Strategy.offload is 'optimizer'"),
        (lambda: msgspec.structs.replace(WHOLE, assignment={"weight": 3}), "Strategy.assignment is"),
    ],
    "Setting": [(lambda: mw.Setting("tiny", CLUSTER, SETTING.job), "Setting.model is 'tiny'. Give a Model.")],
    "derive": [
        (lambda: mw.derive(3), "model is 3"),
        (lambda: mw.derive("tiny", "fsdp"), "strategy is 'fsdp'"),
        (lambda: mw.derive("tiny", optimizer="sgd"), "optimizer 'sgd' is not known"),
        (lambda: mw.derive("llama3-8b", mw.Strategy(mesh=mw.make_mesh({"tensor": 7}))), "tensor=7 does not divide "),
    ],
    "price_strategy": [
        (lambda: mw.price_strategy("tiny", WHOLE), "setting is 'tiny'"),
        (lambda: mw.price_strategy(SETTING, None), "strategy is None"),
        (lambda: mw.price_strategy(SETTING, mw.Strategy(mesh={"rows": 8})), "'rows' is not known"),
        (lambda: mw.price_strategy(SETTING, ALONE), "1 devices, but h100:8x1 has 8 chips"),
    ],
    "rank_plans": [
        (lambda: mw.rank_plans(PLAN), "setting is a Plan. Give a Setting."),
        (lambda: mw.rank_plans(SETTING, axes={"fsdp": 0}), "fsdp=0 must be at least 1"),
        (lambda: mw.rank_plans(SETTING, axes={"fsdp": 3}), "does not divide the 8 chips"),
        (lambda: mw.rank_plans(SETTING, overrides={"remat": 7}), "strategy.remat"),
        (lambda: mw.rank_plans(SETTING, overrides={"rows": 7}), "strategy.rows cannot be set here"),
        (lambda: mw.rank_plans(SETTING, top="a"), "top is 'a'"),
    ],
    "Service": [
        (lambda: mw.Service(prompt_len="a", output_len=3), "Service.prompt_len is 'a'. Give a whole number."),
        (lambda: mw.Service(prompt_len=0, output_len=3), "service.prompt_len=0 must be from 1 to"),
        (lambda: mw.Service(prompt_len=8, output_len=3, ttft_s=-1), "service.ttft_s=-1 must be above 0"),
    ],
    "ServicePlan": [(lambda: mw.load_plan("/", mw.ServicePlan), "cannot be read")],
    "explain_service": [(lambda: mw.explain_service("svc.toml"), "plan is 'svc.toml'. Give a ServicePlan.")],
    "prove_service": [(lambda: mw.prove_service("svc.toml"), "plan is 'svc.toml'. Give a ServicePlan.")],
    "plan_service": [
        (lambda: mw.plan_service("x", mw.Service(prompt_len=8, output_len=3)), "setting is 'x'. Give a Setting."),
        (lambda: mw.plan_service(SETTING, None), "plan_service: service is None. Give a Service."),
        (
            lambda: mw.plan_service(SETTING, mw.Service(prompt_len=8, output_len=3), axes={"fsdp": 2}),
            "'fsdp' splits no",
        ),
    ],
    "explain": [(lambda: mw.explain("q.toml"), "explain: plan is 'q.toml'. Give a Plan.")],
    "changed_plan": [
        (lambda: mw.changed_plan(PLAN, job=None), "Plan.job is None. Give a Job."),
        (lambda: mw.changed_plan(PLAN, jobs=None), "'jobs' is no field of a plan that can change. Did you mean 'job'?"),
        (lambda: mw.changed_plan(PLAN, predicted=None), "'predicted' is no field of a plan that can change"),
        (lambda: mw.changed_plan(PLAN, strategy=mw.Strategy(mesh={"rows": 8})), "'rows' is not known"),
    ],
    "Plan": [
        (lambda: msgspec.structs.replace(PLAN, cluster="h100:8x1"), "Plan.cluster is 'h100:8x1'. Give a Cluster.")
    ],
    "load_plan": [(lambda: mw.load_plan("/"), "Is a directory"), (lambda: mw.load_plan(None), "path is None")],
    "save_plan": [
        (lambda: mw.save_plan(PLAN, "/tmp"), "/tmp: Is a directory"),
        (lambda: mw.save_plan(None, "a.toml"), "plan is None"),
    ],
    "ProofOptions": [
        (lambda: mw.ProofOptions(depth="deep"), "ProofOptions.depth is 'deep'. Give lower, partition or full."),
        (lambda: mw.ProofOptions(timeout_s="x"), "ProofOptions.timeout_s is 'x'. Give a finite number."),
    ],
    "prove_strategy": [
        (lambda: mw.prove_strategy(None, WHOLE), "setting is None"),
        (lambda: mw.prove_strategy(SETTING, ALONE), "the mesh has 1 devices"),
    ],
    "TextOptions": [
        (lambda: mw.TextOptions(max_tokens=-1), "max_tokens is -1"),
        (lambda: mw.TextOptions(mesh="tensor=8"), "TextOptions.mesh is 'tensor=8'"),
    ],
    "generate_text": [
        (lambda: mw.generate_text(None, ["a"]), "folder is None"),
        (lambda: mw.generate_text("/", "a prompt"), "prompts is 'a prompt'. Give a list of text."),
        (lambda: mw.generate_text("/", ["a"]), "has no config.json"),
    ],
    "run_training": [
        (lambda: mw.run_training("q.toml"), "plan is 'q.toml'"),
        (lambda: mw.run_training(PLAN, 3), "settings is 3"),
        (lambda: mw.run_training(PLAN), "the plan is for 8 h100 chips"),
    ],
    "TrainStep": [
        (lambda: mw.TrainStep("tiny", ALONE), "TrainStep: model is 'tiny'"),
        (lambda: mw.TrainStep(MODEL, ALONE, optimizer=3), "optimizer is 3"),
        (lambda: mw.TrainStep(MODEL, mw.Strategy(mesh=mw.make_mesh({}))), "needs an optimizer"),
    ],
    "PackedStep": [
        (lambda: packed(max_len="a"), "PackedStep: max_len is 'a'"),
        (lambda: packed(max_seqs=0), "max_seqs=0"),
        (lambda: packed(storage=Storage(weights="fp4")), "planned, not executed"),
    ],
    "open_engine": [
        (lambda: mw.open_engine(None), "open_engine: folder is None"),
        (lambda: mw.open_engine("/", 3), "open_engine: options is 3"),
        (lambda: mw.open_engine("/"), "has no config.json"),
    ],
    "EngineOptions": [(lambda: mw.EngineOptions(max_len=-1), "EngineOptions max_len is -1")],
    "Engine": [(lambda: mw.Engine(packed(), {}, 3), "Engine: limits is 3")],
    "TokenRequest": [
        (lambda: mw.TokenRequest(prompt="ab", max_tokens=1), "TokenRequest.prompt is 'ab'. Give a tuple."),
        (lambda: mw.TokenRequest(prompt=("a",), max_tokens=1), "has a str. Give the numbers of its tokens"),
        (lambda: mw.TokenRequest(prompt=(1,), max_tokens=None), "max_tokens is None. Give a int"),
    ],
    "SlotEngine": [(lambda: mw.SlotEngine(3), "SlotEngine: step is 3")],
}
"""Public name -> calls, and what each says."""


def test_the_table_has_every_name():
    assert set(CALLS) == set(mw.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_hostile_values_get_one_line(name):
    for call, words in CALLS[name]:
        with pytest.raises((InputError, CannotRunError), match=re.escape(words)) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_what_is_clear_is_taken(tmp_path):
    assert setting(batch=2.0**20, seq_len="4Ki").job == mw.Job(batch_seqs=256, seq_len=4096)
    assert setting(batch=2**20).job == setting(batch="1Mi").job
    assert mw.Job(batch_seqs=1e6, seq_len=8).batch_seqs == 1_000_000
    mw.save_plan(PLAN, str(tmp_path / "plan.toml"))
    assert mw.load_plan(tmp_path / "plan.toml") == mw.load_plan(str(tmp_path / "plan.toml"))
    assert mw.load_model(Path("tiny")) == MODEL
    assert mw.make_mesh({"fsdp": 8.0}) == WHOLE.mesh
    assert msgspec.structs.replace(WHOLE, offload=["optimizer"]).offload == ("optimizer",)
