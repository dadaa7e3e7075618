#!/usr/bin/env bash
# What a GPU that is at hand for a quarter of an hour can tell: five parts in order of value, within nine minutes.
#
#   benchmarks/on_gpu.sh [--tiny] [kernels] [train] [serve] [bench] [trace]
#
# Text and JSON go to $OUT (default: on_gpu), 7 files. Each part is a process with a limit of time and ends with one line:
# what, figure, goal, met or not. --tiny runs the same programs at toy size on any backend. A machine that lacks packages
# and a network installs them from .gpu_pack, which benchmarks/pack_gpu.sh makes. PYTHON is the interpreter.
# A part that runs again replaces its own JSON; text is added to. Ctrl-C ends the part with what it has.
set -uo pipefail
[[ -z ${OUT:-} ]] || OUT=$(realpath -m "$OUT")
[[ ${PYTHON:-} != */* ]] || PYTHON=$(realpath -ms "$PYTHON")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A LIMIT_S=([kernels]=90 [train]=170 [serve]=130 [bench]=80 [trace]=70)
tiny=() parts=()
for argument in "$@"; do
  if [[ $argument == --tiny ]]; then tiny=(--tiny)
  elif [[ $argument == --help ]]; then sed -n '1d; /^set/q; s/^# \{0,1\}//p' benchmarks/on_gpu.sh; exit 0
  elif [[ -v LIMIT_S[$argument] ]]; then parts+=("$argument")
  else echo "on_gpu.sh has no part '$argument'. Use --tiny, kernels, train, serve, bench or trace." >&2; exit 2
  fi
done
[[ ${#parts[@]} -gt 0 ]] || parts=(kernels train serve bench trace)

out=${OUT:-on_gpu} scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out" || exit 2
[[ -w $out ]] || { echo "OUT=$out cannot be written to. Name another folder." >&2; exit 2; }
python=${PYTHON:-python3}
[[ -n ${PYTHON:-} || ! -x .venv/bin/python ]] || python=.venv/bin/python
command -v "$python" > /dev/null || { echo "PYTHON=$python is not there. Name an interpreter that has JAX." >&2; exit 2; }
if [[ -d .gpu_pack ]] && ! "$python" -c "import grain, msgspec, starlette" 2> /dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" .gpu_pack/*.whl || exit 2
fi
export PYTHONPATH="$PWD/src:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# contestants of a part are processes of their own, one after the other, and some programs are those of an earlier part
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR="$scratch/programs"

exec > >(tee -ia "$out/on_gpu.txt") 2>&1
tee=$! failed=0 running=
finish() { # once all text is written
  exec > /dev/null 2>&1
  wait "$tee"
  exit "$1"
}
stop() { # the part keeps what it has and prints its line
  trap '' INT TERM
  [[ -z $running ]] || { kill -TERM "$running"; wait "$running"; } 2> /dev/null
  finish "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
for part in "${parts[@]}"; do
  limit=$((LIMIT_S[$part] * (${#tiny[@]} ? 3 : 1))) began=$SECONDS  # toy sizes have no hurry: a busy CPU is no fault
  echo "== $part, at most $limit s"
  timeout --kill-after=5 "$limit" "$python" "benchmarks/${part}_gpu.py" "${tiny[@]}" --seconds "$((limit - 25))" --out "$out" &
  running=$!
  wait "$running"
  status=$? running=
  echo "   $((SECONDS - began)) s"
  if [[ $status -ne 0 ]]; then
    failed=1
    echo "$part: ended with status $status"
  fi
done
finish "$failed"
