#!/bin/bash
# Trains as islands of one process each, under Open MPI:
#
#   mpirun -n 4 --map-by ppr:1:node -x MASTER_ADDR=$(hostname -f) examples/islands/mpi.sh plan.toml --steps 10000
#
# mpirun sees this script alone, which outlives its island and starts it again; the first rank runs the service too.
set -euo pipefail
plan=${1:?usage: mpirun ... mpi.sh PLAN.toml [options of meshwright train]}
shift
here=$(cd "$(dirname "$0")" && pwd)
export MESHWRIGHT_ISLAND=$OMPI_COMM_WORLD_RANK MESHWRIGHT_ISLANDS=$OMPI_COMM_WORLD_SIZE
export MESHWRIGHT_SERVICE=${MASTER_ADDR:?add: -x MASTER_ADDR=<host of the first rank>}:${SERVICE_PORT:-7400}
export MESHWRIGHT_KEY=${PMIX_NAMESPACE:-mpi}
unset OMPI_COMM_WORLD_SIZE # else all ranks would form one runtime
if [ "$MESHWRIGHT_ISLAND" = 0 ]; then
    bash "$here/island.sh" service "$MESHWRIGHT_SERVICE" &
    trap 'kill $!' EXIT
fi
bash "$here/island.sh" train "$plan" "$@"
