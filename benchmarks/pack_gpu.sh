#!/usr/bin/env bash
# Makes .gpu_pack: the wheels that meshwright needs beside JAX, torch and transformers, for a machine with Python 3.12 and
# without a network, in the versions of requirements.lock. Fails if they and the tree take more than 55 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# not among them: what comes with JAX, torch and transformers, and the renderer of PNGs (33 MB)
NAMES=(altair array-record grain httptools jsonschema jsonschema-specifications llguidance msgspec referencing rpds-py starlette tomli-w uvicorn)
MOST_MB=55
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python

wanted=()
for name in "${NAMES[@]}"; do
  wanted+=("$(grep -oE "^$name==[^ ;]+" requirements.lock)")
done
platforms=()
for version in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
rm -rf .gpu_pack
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest .gpu_pack "${wanted[@]}"
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -ck | awk '/\ttotal$/ {sum += $1} END {print sum}')
total=$(((tree + $(du -sk .gpu_pack | cut -f1)) / 1000))
echo ".gpu_pack: ${#wanted[@]} wheels; $total MB with the tree, at most $MOST_MB"
[[ $total -le $MOST_MB ]]
