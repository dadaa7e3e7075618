#!/bin/bash
# Runs one process of an island, and starts it again when it ends badly: what `launch --elastic` does on one machine.
# MESHWRIGHT_SERVICE, MESHWRIGHT_ISLANDS, MESHWRIGHT_ISLAND and MESHWRIGHT_KEY are set by who calls it.
#
#   island.sh train plan.toml ...       the words of `meshwright`
#   island.sh service HOST:PORT         the membership service
set -uo pipefail
program=(meshwright "$@")
if [ "$1" = service ]; then
    # Members of a service that was killed come back to the next one: it waits for them, so each counts as restarted.
    bounds="{\"count\": $MESHWRIGHT_ISLANDS, \"least\": ${LEAST:-1}, \"restarted\": true}"
    program=(python -m meshwright.islands "$2" "$bounds")
fi
delay=1
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
while true; do
    began=$SECONDS
    "${program[@]}" &
    child=$!
    wait "$child"
    status=$?
    while kill -0 "$child" 2>/dev/null; do # the trap ended the wait: the run writes a checkpoint
        wait "$child"
        status=$?
    done
    case $status in
    0 | 2 | 3 | 75 | 143) exit "$status" ;; # done, wrong input, cannot run, stopped as it was asked to
    esac
    [ $((SECONDS - began)) -gt 60 ] && delay=1
    echo "island ${MESHWRIGHT_ISLAND:--} ended with $status and is started again in $delay s" >&2
    sleep "$delay"
    delay=$((delay < 30 ? 2 * delay : 30))
done
