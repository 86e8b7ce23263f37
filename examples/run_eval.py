"""`python examples/run_eval.py --config FILE.yaml key=value ...` is `nemo-rl-offload eval ...`."""

import sys

from nemo_rl_offload.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
