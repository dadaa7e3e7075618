"""What a person can get wrong: one line that says what to change, nothing on standard output, no traceback."""

import json

import pytest

from tests.speed import took

PLAN = ("plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "128seq", "--seq", "4096")
QUICK = ("plan", "tiny", "--on", "v5e:2x2", "--batch", "32seq", "--seq", "512", "--axes", "fsdp=4")
"""For what is said after the search."""
ROOFLINE = ("roofline", "bf16[B,D] * bf16[D,F] -> bf16[B,F]")
SHARD = ("shard", "A[I_X,J] * B[J,K] -> C[I_X,K]")
SIZES = ("--mesh", "X=4", "--dims", "I=8,J=4,K=4")


def swapped(args, old, new):
    return tuple(new if one == old else one for one in args)


CASES = [
    # the command itself
    (2, ("plam",), "there is no verb 'plam'. Did you mean 'plan'?"),
    (2, ("show", "chips", "--jsn"), "No such option '--jsn'"),
    (2, ("plan", "tiny", "--on", "v5e:4x4"), "Missing option '--batch'"),
    (2, ("explain",), "Missing argument 'PLAN.toml | MODEL'"),
    # questions about a plan
    (2, (*QUICK, "--why-not", "tensr=2"), "tensr is neither a mesh axis nor a field of the strategy. Did you mean"),
    (2, (*QUICK, "--why-not", "tensor"), "is not name=value. Write for example tensor=16,remat=block."),
    (2, (*QUICK, "--why-not", "tensor=2,tensor=4"), "tensor is given twice"),
    (2, (*QUICK, "--why-not", "remat=blocks"), "Did you mean 'block'?"),
    (2, (*QUICK, "--what-if", "chips=2"), "is not a factor from 0.001x to 1000x. Write for example chips=2x."),
    (2, (*swapped(QUICK, "v5e:2x2", "h100:2x2"), "--what-if", "ici=2x"), "h100:2x2 has no ici. Change nvlink or nic."),
    (2, (*QUICK, "--what-if", "chip.flop=2x"), "Did you mean 'chip.flops'?"),
    (2, (*swapped(QUICK, "32seq", "256seq"), "--what-if", "batch=0.3x"), "is 76.8, not a positive whole number"),
    # names
    (2, ("show", "llama3-8c"), "'llama3-8c' is no model, chip or cluster. Did you mean 'llama3-8b'?"),
    (2, ("show", ""), "'' is no model, chip or cluster."),
    (2, swapped(PLAN, "llama3-8b", "llama3-8c"), "Did you mean 'llama3-8b'?"),
    (2, swapped(PLAN, "v5e:4x4", "v5q:4x4"), "unknown chip 'v5q'. Did you mean 'v5p'?"),
    (2, (*ROOFLINE, "--dims", "B=1,D=1,F=1", "--on", "v5q"), "unknown chip 'v5q'"),
    (2, (*ROOFLINE, "--dims", "B=1,D=1,F=1", "--on", "cpu"), "cpu has no known peak"),
    (2, swapped(PLAN, "v5e:4x4", "ü"), "cluster 'ü' is not chip:shape. Write for example v5p:16x20x28"),
    (2, swapped(PLAN, "v5e:4x4", "v5e:4x4x4"), "v5e has 2. 64 chips are for example v5e:8x8."),
    (2, swapped(PLAN, "v5e:4x4", "v5e:0x4"), "Give positive whole numbers"),
    (2, swapped(PLAN, "v5e:4x4", "0*v5e:4x4"), "cluster 0*v5e:4x4 has a size below 1. Give positive whole numbers."),
    (2, (*PLAN, "--top", "0"), "--top '0' is below 1. Give a number of at least 1."),
    (2, (*PLAN, "--set", "capacity_factor=0.1"), "0.1 drops tokens however even the load is. Give at least 1, or 0"),
    (2, swapped(PLAN, "v5e:4x4", "v100:8"), "v100 has no bf16 matrix rate in its table; it has fp16, fp32."),
    (2, swapped(PLAN, "v5e:4x4", "trn3:4x4"), "nic_bytes_per_s of trn3 is not known"),
    pytest.param(
        3, swapped(PLAN, "llama3-8b", "deepseek-v3"), "deepseek-v3 with 128 sequences of 4096 does not fit v5e:4x4",
        marks=pytest.mark.slow,
    ),
    # sizes of the job
    (2, swapped(PLAN, "128seq", "4097"), "a whole number of sequences of 4096 (1, remainder 1). Use 4Ki (1 sequence)."),
    (2, swapped(PLAN, "128seq", "4M"), "Use 4Mi (1,024 sequences)."),
    (2, swapped(PLAN, "128seq", "-4Mi"), "batch '-4Mi' is below 1. Give a number of at least 1."),
    (2, swapped(PLAN, "128seq", "0seq"), "batch '0' is below 1"),
    (2, swapped(PLAN, "128seq", "1000"), "less than one sequence of 4096. Use at least 4096 tokens."),
    (2, swapped(PLAN, "128seq", "1e300"), "batch '1e300' is larger than 1e+60"),
    (2, swapped(PLAN, "128seq", "1e50"), "Give at most 1099511627776 sequences"),
    (2, swapped(PLAN, "4096", "0"), "--seq '0' is below 1"),
    (2, (*PLAN, "--set", "remat=7"), "strategy.remat is 7. Give text or a list of text."),
    (2, (*PLAN, "--set", "remt=block"), "'remt=block' names no field. Did you mean 'remat'?"),
    (2, (*PLAN, "--set", "chip.memory=-5GB"), "there is no section 'chip' here"),
    (2, (*PLAN, "--axes", "tensor="), "'tensor=' is not a mesh axis size. Write fsdp=8,tensor=4."),
    (2, (*PLAN, "--batch", "1e30"), "batch 1e30 is 1e+30 tokens. Give at most"),
    (2, (PLAN[0], "", *PLAN[2:]), "model '' is neither in the catalogue"),
    (2, ("sweep", "llama3-8b,", "--on", "h100:8x1", "batch=1Mi"), "'llama3-8b,' has an empty part"),
    (2, (*PLAN, "--tokens", "many"), "tokens 'many' is not a number"),
    (2, (*PLAN, "--tokens", "0"), "--tokens '0' is below 1"),
    # the mesh
    (2, (*PLAN, "--axes", "fspd=4"), "mesh axis 'fspd' is not known. Did you mean"),
    (2, (*PLAN, "--axes", "fsdp"), "'fsdp' is not a mesh axis size"),
    (2, (*PLAN, "--axes", ""), "'' is not a mesh axis size"),
    (2, (*PLAN, "--axes", "fsdp=-1"), "size of mesh axis fsdp '-1' is below 1"),
    (3, (*PLAN, "--axes", "fsdp=7"), "fsdp=7 does not divide the 16 chips of v5e:4x4"),
    (3, (*PLAN, "--axes", "tensor=3"), "tensor=3 does not divide the 16 chips"),
    (3, swapped(PLAN, "llama3-8b", "llama3-70b"),
     "llama3-70b with 128 sequences of 4096 does not fit v5e:4x4: the best mesh (16 chips, any remat policy) needs "
     "69 GB per chip, but a chip has 16.1 GB besides the 5% that stays free. At least 96 chips would hold it."),
    *[(3, (*PLAN, "--axes", "data=8,tensor=2", "--set", f"strategy.zero={stage}"),
       f"zero={stage} shards over fsdp, and the replicas of data=8 hold everything whole. "
       f"Use --axes fsdp=8,tensor=2 --set strategy.zero={stage}.") for stage in (1, 2, 3)],
    (3, ("explain", *PLAN[1:], "--axes", "data=16", "--set", "zero=1"), "Use --axes fsdp=16 --set strategy.zero=1."),
    # refused before this machine is measured
    *[(3, (verb, "tiny", "--on", "cpu:8", "--batch", "16seq", "--seq", "64", "--axes", "data=8", "--set", "zero=1"),
       "Use --axes fsdp=8 --set strategy.zero=1.") for verb in ("train", "plan")],
    (3, ("train", "tiny", "--on", "cpu:8", "--batch", "16seq", "--seq", "64", "--axes", "fsdp=16"), "does not divide"),
    (2, ("train", "gpt2", "--on", "cpu:8", "--batch", "16seq", "--seq", "2048"), "learned positions of gpt2"),
    (3, ("sweep", "tiny", "--on", "h100:8x1", "micro=1", "data=8", "zero=2"),
     "Use --axes fsdp=8 --set strategy.zero=2."),
    # fields
    (2, (*PLAN, "--set", "remat"), "--set 'remat' has no value. Write KEY=VALUE, such as strategy.remat=block."),
    (2, (*PLAN, "--set", "strategi.remat=block"), "there is no section 'strategi' here. Did you mean 'strategy'?"),
    (2, (*PLAN, "--set", "strategy.remot=block"), "strategy.remot is not a field. Did you mean 'remat'?"),
    (2, (*PLAN, "--set", "strategy.foo=1"), "state, tensor, zero."),
    (2, (*PLAN, "--set", "model.num_layer=4"), "model.num_layer is not a field. Did you mean 'num_layers'?"),
    (2, (*PLAN, "--set", "model.num_layers=many"), "model.num_layers is 'many'. Give a whole number."),
    (2, (*PLAN, "--set", "model.num_heads=7"), "num_kv_heads=8 does not divide num_heads=7"),
    (2, (*PLAN, "--set", "strategy.remat=blok"), "remat 'blok' is not a policy. Did you mean 'block'?"),
    (2, (*PLAN, "--collective-matmul", "both"), "'both' is not one of 'none', 'one-way', 'two-way'."),
    (2, (*PLAN, "--set", "strategy.collective_matmul=both"), "Give none, one-way or two-way."),
    (2, (*PLAN, "--collective-matmul", "none", "--set", "strategy.collective_matmul=one-way"), "and in --set. Leave"),
    (2, (*PLAN, "--set", "strategy.state=bf32"), "state 'bf32' is not known. Did you mean 'fp32'?\n"),
    (2, (*PLAN, "--set", "strategy.tensor=four"), "--set strategy.tensor=four is not a whole number"),
    (2, (*PLAN, "--set", "strategy.mesh=4"), "give the size of one axis, such as strategy.tensor=4"),
    (2, (*PLAN, "--axes", "tensor=4", "--set", "strategy.tensor=4"), "tensor is given in --axes and in --set"),
    (3, (*PLAN, "--set", "strategy.num_microbatches=7"), "Use num_microbatches in {1, 2, 4, 8, 16, 32, 64, 128}."),
    # notation
    (2, ("roofline", "nonsense", "--dims", "B=1", "--on", "v5e"), "'nonsense' is no op. Write A[I,J]"),
    (2, ("roofline", "A[B,D * B[D,F] -> C[B,F]", "--dims", "B=1", "--on", "v5e"), "is not a product of two arrays"),
    (2, ("roofline", "x[] * y[] -> z[]", "--dims", "B=1", "--on", "v5e"), "has no dims"),
    (2, ("roofline", "A[B_X,D] * B[D,F] -> C[B,F]", "--dims", "B=1", "--on", "v5e"), "Use meshwright shard for a mesh"),
    (2, (*ROOFLINE, "--dims", "B=128,D=8192", "--on", "v5e"), "no size for F. Give every dim: --dims F=...."),
    (2, (*ROOFLINE, "--dims", "B=0,D=1,F=1", "--on", "v5e"), "size of dim B '0' is below 1"),
    (2, (*ROOFLINE, "--dims", "B=1e300,D=1,F=1", "--on", "v5e"), "B '1e300' is larger than 1e+15"),
    (2, (*ROOFLINE, "--dims", "B=-4,D=1,F=1", "--on", "v5e"), "size of dim B '-4' is below 1"),
    (2, (*ROOFLINE, "--dims", "B=1,D=1,F=1", "--on", "v5e", "--channel", "tin"), "'tin' is not one of 'hbm'"),
    (2, (*ROOFLINE, "--dims", "B=1,D=1,F=1", "--on", "v5e", "--png", "x.bmp"), "Use a name that ends in .png"),
    (2, ("shard", "A[I_X,J_X] * B[J,K] -> C[I,K]", *SIZES), "an axis can split one dim of an array once"),
    (2, ("shard", "A[I_Z,J] * B[J,K] -> C[I,K]", *SIZES), "uses mesh axis Z, which the mesh lacks"),
    (2, ("shard", "∑ñ", *SIZES), "'∑ñ' is not one product"),
    (2, (*SHARD, "--mesh", "X=3", "--dims", "I=8,J=4,K=4"), "I=8 of A[I_X, J] does not divide by X=3"),
    (2, (*SHARD, "--mesh", "X=0", "--dims", "I=8,J=4,K=4"), "size of mesh axis X '0' is below 1"),
    (2, (*SHARD, *SIZES, "--calibration", "x.toml"), "needs the cluster it is for: give --on"),
    (3, (*SHARD, *SIZES, "--on", "v5e:1x2"), "the mesh has 4 devices, but v5e:1x2 has 2 chips"),
    (2, (*SHARD, "--mesh", "X=128", "--dims", "I=128,J=4,K=4", "--run"), "--run takes at most 64 devices"),
    (2, (*SHARD, "--mesh", "X=8192", "--dims", "I=8192,J=4,K=4", "--png", "x.png"), "--png takes at most 4096 devices"),
    (2, (*SHARD, "--mesh", "X=4", "--dims", "I=1G,J=1G,K=4", "--run"), "--run holds whole arrays on this machine"),
    # files
    (2, ("explain", "none.toml"), "none.toml cannot be read (No such file or directory)"),
    (2, swapped(PLAN, "v5e:4x4", "none.toml"), "none.toml cannot be read (No such file or directory)"),
    (2, swapped(PLAN, "llama3-8b", "none.json"), "none.json cannot be read (No such file or directory)"),
    (2, (*swapped(PLAN, "v5e:4x4", "cpu:2"), "--calibration", "datasheet"), "this machine, which has no data sheet"),
    (2, (*PLAN, "--calibration", "none.toml"), "none.toml cannot be read (No such file or directory)"),
    (2, (*QUICK, "-o", "."), "cannot write the plan to .: "),
    (2, (*QUICK, "-o", "a" * 300), "File name too long"),
    (2, ("show", "a" * 300), "File name too long"),
    (2, ("hlo", "a" * 300), "File name too long"),
    # what nobody means
    (2, ("show", "v4:99999999x99999999x99999999x99999999"), "has more than 10,000,000 chips"),
    (2, swapped(PLAN, "v5e:4x4", f"h100:8x{'9' * 5000}"), "is not chip:shape"),
    (2, ("budget", "--loss", "nan"), "--loss nan: give a finite number that is not negative."),
    (2, ("budget", "1e24", "--on", "h100:8x8", "--restart-s", "-1"), "--restart-s -1.0: give a finite number"),
    (2, ("transfer", "1" * 400, "--on", "v5e:4x4", "--from", "0,0", "--to", "1,1"), "is larger than 1e+60"),
    (2, (*PLAN, "--set", "model.kv_lora_rank=3"), "qk_nope_head_dim=0 must be at least 1."),
    (2, (*PLAN, "--set", "model.lora=4"), "model.lora is 4. Give a table of rank, alpha, targets, base."),
    (2, (*PLAN, "--set", "model.lora.rnk=4"), "model.lora.rnk is not a field. Did you mean 'rank'?"),
    (2, (*PLAN, "--set", "model.lora.rank=x"), "model.lora.rank is 'x'. Give a whole number."),
    (2, (*PLAN, "--set", "model.lora.alpha=-3"), "lora.alpha=-3 must be above 0."),
    (2, (*PLAN, "--set", 'model.lora={rank=0}'), "lora.rank=0 must be at least 1"),
    (2, (*PLAN, "--set", "model.rope_scaling={a=1}"), "model.rope_scaling.a is not a field."),
    (2, (*PLAN, "--set", "model.rope_theta=nan"), "model.rope_theta is nan: give a finite number, at most 1e+60."),
    (2, (*PLAN, "--set", f"model.rope_theta={'9' * 5000}"), "Give a finite number."),
    (2, ("shard", "A[I,J] * B[J,K] -> C[I,K" + "," * 30_000 + "]", *SIZES), "at most 20,000 characters"),
    (2, ("show", "x" * 100 + "\ny"), "x\\ny' is no model, chip or cluster."),
    (2, ("schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--forward", "9" * 400), "is too long"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "args", "message"), CASES, ids=lambda value: None)
def test_one_line_that_says_what_to_change(call, code, args, message):
    call(*args).assert_refused(code, message)
    if args[0] != "plam":
        call(*args, "--json").assert_refused(code, message)


def test_what_is_given_is_not_repeated_whole(call):
    for args in (
        ("show", "x" * 200),
        (*PLAN, "--axes", "x" * 9000),
        (*PLAN, "--no", "x y " * 2000),
        ("show", "a\nb\x1b[0m"),
    ):
        said = call(*args)
        assert (said.code, said.err.count("\n"), "\x1b" in said.err) == (2, 1, False)
        assert len(said.err) < 600


def test_spaces_cost_nothing(call):
    with took() as cpu:
        said = call("shard", f"A[I_X,J]{' ' * 60_000}* B[J,K] -> C[I_X,K]", *SIZES)
    assert said.code == 0
    assert cpu.yardsticks < 50


FILES = [
    ("explain", "x.toml", "version = 1\nmodel = [\n", "x.toml:3: not valid TOML"),
    ("explain", "x.toml", "", "x.toml: this is not a plan file: it has no version"),
    (
        "explain",
        "x.toml",
        "[service]\n",
        "x.toml: this is not a plan file: it has no version. Write one with service -o",
    ),
    ("explain", "x.toml", "version = 7\n", "x.toml:1: plan version 7 is not known"),
    ("explain", "x.toml", "version = 1\nmodle = 1\n", "x.toml:2: modle is not a field. Did you mean 'model'?"),
    ("show", "x.json", '{"model_type": "llama",\n "hidden_size": }', "x.json:2:17: broken JSON"),
    ("show", "x.json", "{}", "x.json: the key 'model_type' is missing"),
    ("show", "x.toml", 'chip = "v5e"\nshape = [4, four]\n', "x.toml:2: not valid TOML"),
    ("show", "x.toml", 'chip = "v5q"\nshape = [4, 4]\n', "x.toml:1: unknown chip 'v5q'"),
    ("show", "x.toml", 'chip = "v5e"\nshap = [4, 4]\n', "x.toml:2: shap is not a field. Did you mean 'shape'?"),
]


@pytest.mark.parametrize(("verb", "name", "text", "message"), FILES, ids=[m for *_, m in FILES])
def test_broken_files_are_told_by_file_and_line(call, tmp_path, verb, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    call(verb, name).assert_refused(2, message)


def test_json_comes_alone_on_standard_output(call):
    """Messages beside a result go to standard error, so that the output stays one object."""
    said = call(*QUICK, "--json", "-o", "plan.toml")
    assert said.code == 0
    assert said.err == "wrote plan.toml\n"
    assert set(json.loads(said.out)) >= {"model", "cluster", "job", "strategies"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "-max-len", "5"), "No such option '-max-len'. Did you mean '--max-len'?"),
        (("generate", "x", "-out", "y"), "No such option '-out'. Did you mean '--out'?"),
        (("train", "x", "-seq", "5"), "No such option '-seq'. Did you mean '--seq'?"),
    ],
)
def test_long_options_with_one_dash(call, args, message):
    """`-out y` is not `-o` with the value ut."""
    call(*args).assert_refused(2, message)
