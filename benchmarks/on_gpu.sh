#!/usr/bin/env bash
# What a GPU that is at hand for a quarter of an hour can tell: five parts in order of value, within nine minutes.
#
#   benchmarks/on_gpu.sh [--tiny] [kernels] [train] [serve] [bench] [trace]
#
# Text and JSON go to $OUT (default: on_gpu), 7 files. Each part is a process with a limit of time and ends with one line:
# what, figure, goal, met or not. --tiny runs the same programs at toy size on any backend. A machine that lacks packages
# and a network installs them from .gpu_pack, which benchmarks/pack_gpu.sh makes. PYTHON is the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A LIMIT_S=([kernels]=90 [train]=170 [serve]=130 [bench]=80 [trace]=70)
tiny=() parts=()
for argument in "$@"; do
  if [[ $argument == --tiny ]]; then tiny=(--tiny)
  elif [[ -v LIMIT_S[$argument] ]]; then parts+=("$argument")
  else echo "on_gpu.sh has no part '$argument'. Use --tiny, kernels, train, serve, bench or trace." >&2; exit 2
  fi
done
[[ ${#parts[@]} -gt 0 ]] || parts=(kernels train serve bench trace)

out=${OUT:-on_gpu} scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out" || exit 2
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python
if [[ -d .gpu_pack ]] && ! "$python" -c "import grain, msgspec, starlette" 2> /dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" .gpu_pack/*.whl || exit 2
fi
export PYTHONPATH="$PWD/src:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# contestants of a part are processes of their own, one after the other, and some programs are those of an earlier part
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR="$scratch/programs"

failed=0
for part in "${parts[@]}"; do
  limit=$((LIMIT_S[$part] * (${#tiny[@]} ? 3 : 1))) began=$SECONDS  # toy sizes have no hurry: a busy CPU is no fault
  echo "== $part, at most $limit s"
  timeout --kill-after=5 "$limit" "$python" "benchmarks/${part}_gpu.py" "${tiny[@]}" --seconds "$((limit - 25))" --out "$out"
  status=$?
  echo "   $((SECONDS - began)) s"
  if [[ $status -ne 0 ]]; then
    failed=1
    echo "$part: ended with status $status"
  fi
done > >(tee "$out/on_gpu.txt") 2>&1
wait $!
exit $failed
