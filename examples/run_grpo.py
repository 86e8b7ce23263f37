"""`python examples/run_grpo.py --config FILE.yaml key=value ...` is `nemo-rl-offload run grpo ...`."""

import sys

from nemo_rl_offload.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "grpo", *sys.argv[1:]]))
