"""`python examples/run_sft.py --config FILE.yaml key=value ...` is `nemo-rl-offload run sft ...`."""

import sys

from nemo_rl_offload.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "sft", *sys.argv[1:]]))
