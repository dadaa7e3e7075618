"""Every option of the calculators changes the answer, or is refused with what it is for."""

import re

import pytest

VALUES = {
    "compare": [
        "--seq 512", "--shards 8", "--state fp32", "--average bf16", "--batch 1Mi", "--results-per-layer 3",
        "--chips 64", "--micro 2", "--tensor 2", "--on h200",
    ],
    "transfer": [
        "--via dcn", "--dtype int8", "--collective permute", "--one-way", "--leg 1GFLOP@compute",
    ],
    "budget": [
        "--law epoch", "--mfu 0.3", "--dtype fp8", "--pue 1.2", "--host-share 0.2", "--price 3", "--watts 500",
        "--chips-per-rack 8", "--m2-per-rack 2", "--years", "--nodes 8", "--failures-per-1000-node-days 5",
        "--checkpoint-s 9", "--restart-s 9", "--interval-s 9",
    ],
    "batch": ["--on v5p:4x4x4", "--model mixtral-8x7b", "--weights int8", "--loss 2", "--max-micro 2", "--top 2"],
    "formats": ["--value 1.1", "--scale 2", "--dot 64", "--load-cycles 5", "--vector-bits 256"],
    "roofline": ["--channel vmem", "--batch 4"],
    "systolic": ["--seed 3", "--weights 16x16", "--on v5e"],
    "limits": ["--tensor 4", "--tensor-axes 2", "--dtype int8", "--state fp32"],
    "serving": [
        "--prompt 100", "--output 100", "--batch 3", "--context 100", "--weights int8", "--kv int8", "--dtype int8",
        "--params 1M", "--kv-per-token 1kB", "--mfu 0.3", "--price 3", "--set num_kv_heads=1", "--contexts 64,128",
        "--accept 0.5", "--draft-cost 0.2", "--prefixes 1000000", "--cache 1GB", "--zipf 1",
    ],
    "mask": ["--seq 256", "--block 64", "--heads 2", "--head-dim 64", "--on v5e", "--score alibi", "--png x.png"],
    "sweep": ["--seq 512", "--remat block", "--step"],
}  # fmt: skip
CALLS = [
    "compare tiny", "compare tiny --zero", "compare tiny --bytes", "compare tiny --hold",
    "compare tiny --hold --batch 1Mi", "compare tiny --activations",
    "transfer 1GB --on v5e:16x16 --axis x", "transfer 1GB --on v5e:4x4 --from hosts --to 0,0",
    "transfer 1GB --on v5e:4x4 --from 0,0 --to 3,3", "transfer 1GB --on v5e:4x4 --leg hbm",
    "budget 1e24", "budget 1e24 --on h100:8x128", "budget 1e24 --on h100:8x128 --failures-per-1000-node-days 3",
    "batch --batch 1024seq --seq 1024", "batch --batch 1024seq --seq 1024 --on v5p:2x2x2",
    "formats", "formats fp8-e4m3", "formats fp8-e4m3 --value 3 --dot 32",
    "roofline --attention tiny --on v5e",
    "systolic 8x8 --input 4",
    "mask", "mask causal --seq 512",
    "limits llama3-8b --on v5p:4x4x4 --batch 4Mi --seq 4096",
    "serving tiny --on v5e:2x2 --output 64", "serving tiny --on v5e:2x2 --accept 0.8 --prefixes 100000",
    "sweep batch mlp:512x2048 --on v5p:4x4x4 --batches 256Ki..512Ki",
]  # fmt: skip


@pytest.mark.parametrize("asked", CALLS)
def test_an_option_changes_the_answer_or_is_refused(call, asked):
    args = asked.split()
    before = call(*args, "--json")
    assert before.code == 0, before.err
    for text in VALUES[args[0]]:
        option, *value = text.split()
        if option not in args:
            said = call(*args, option, *value, "--json")
            assert said.code in (0, 2, 3), said.err
            assert (said.out != before.out) if said.code == 0 else said.err.count("\n") == 1, text


def test_the_message_says_what_it_is_for(call):
    for asked, words in (
        ("compare tiny --bytes --average bf16", "--average changes nothing here: it is for --zero or --hold."),
        ("compare tiny --hold --results-per-layer 3", "it is for --hold with --batch."),
        ("transfer 1GB --on v5e:4x4 --axis x --via dcn", "it is for --from hosts, or from one slice to another."),
        ("budget 1e24 --checkpoint-s 9", "it is for --failures-per-1000-node-days."),
    ):
        call(*asked.split()).assert_refused(2, words)


@pytest.mark.parametrize(
    "command",
    [
        "serving llama3-405b --on v5e-book:16x16 --batch 1e30", "serving llama3-8b --on v5e:4x4 --params 1e-9",
        "roofline --attention llama3-70b --on v5e-book --sweep T=256,512 --batch 1e-9", "show llama2-7b --seq 1e-9",
        "shard A[I_X,J]->A[I,J] --mesh X=1e-9 --dims I=64,J=64 --on v5e:4x4", "budget 1e24 --tokens 1e-9",
        "transfer int8[131072,1e30] --on v5e-book:4x4 --axis x", "systolic 8x8 --input 1e30",
        "compare llama3-8b --zero --shards 1e30", "schedule 1f1b --stages 1e30 --microbatches 4",
    ],
)  # fmt: skip
def test_numbers_beyond_use_are_refused_in_one_line(call, command):
    """None is an internal error, a count of 0 or a figure that nobody could mean."""
    said = call(*command.split())
    assert said.code == 2
    assert re.search(r"larger than 1e\+15|not a whole number", said.err)
    assert said.err.count("\n") == 1
