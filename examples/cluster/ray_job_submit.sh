#!/usr/bin/env bash
# Submit a run to a Ray cluster that is up:
#   examples/cluster/ray_job_submit.sh grpo --config examples/configs/grpo_math_1B_megatron.yaml --run-dir /shared/runs/mine \
#     cluster.num_nodes=2 cluster.gpus_per_node=8
# This project must stand, installed, at the same path on all nodes. Variables:
#   RAY_API_SERVER_ADDRESS  the cluster's dashboard (default: http://127.0.0.1:8265)
#   RAY_AUTH_TOKEN          with RAY_AUTH_MODE=token, where the cluster asks for one
#   PROJECT_DIR             where the project stands on the nodes (default: where it stands here)
#   NEMO_RL_OFFLOAD         the command there (default: uv run nemo-rl-offload)
set -euo pipefail
project=${PROJECT_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
read -r -a program <<< "${NEMO_RL_OFFLOAD:-uv run nemo-rl-offload}"
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- \
  env --chdir "$project" "${program[@]}" run "$@"
