#!/usr/bin/env bash
# What only a GPU can show of the paged stash: its tests there, then its bench. One argument: where the figures go.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/nvidia-h200}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CUBLAS_WORKSPACE_CONFIG=:4096:8
python3 -m pytest -m cuda tests/unit/paged_stash tests/functional/test_paged_stash_cuda.py | tee "$out/stash_tests.txt"
tests=$?
python3 -m nemo_rl_offload.cli bench stash --rounds 20 --out "$out" | tee "$out/stash_tables.txt"
exit $((tests | $?))
