#!/bin/sh
# Two real processes with two of four emulated devices each, beside one process with all four.
# The plan is made once: it says how the devices are split, whoever holds them.
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
given="--steps 5 --set train.log_every=1 --set train.learning_rate=0.01 --set train.warmup_steps=1 --set train.held_out=0"
meshwright plan tiny --on cpu:4 --axes data=2,fsdp=2 --batch 8seq --seq 64 -o "$here/plan.toml" \
    --set model.vocab_size=512 --set model.num_layers=2 --set model.d_model=64 --set model.d_ff=128 --set model.head_dim=8
meshwright train "$here/plan.toml" --runs "$here/one" $given > "$here/one.txt"
meshwright launch --processes 2 -- train "$here/plan.toml" --runs "$here/two" $given > "$here/two.txt"
echo "losses of one process, and of two"
for run in one two; do
    sed 's/.*"loss":\([^,]*\),.*/\1/' "$here/$run/tiny-001/metrics.jsonl" > "$here/$run.losses"
done
paste "$here/one.losses" "$here/two.losses" | awk '
    { print; apart = $1 - $2; if (apart < 0) apart = -apart; if (apart > 1e-5 * $1) unlike = 1; last = $2 }
    NR == 1 { first = $2 }
    END { if (unlike || last >= first) { print "they are not alike, or did not fall"; exit 1 } }'
