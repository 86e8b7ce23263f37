"""`python examples/run_distillation.py --config FILE.yaml key=value ...` is `nemo-rl-offload run distillation ...`."""

import sys

from nemo_rl_offload.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "distillation", *sys.argv[1:]]))
