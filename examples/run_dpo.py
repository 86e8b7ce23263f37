"""`python examples/run_dpo.py --config FILE.yaml key=value ...` is `nemo-rl-offload run dpo ...`."""

import sys

from nemo_rl_offload.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", "dpo", *sys.argv[1:]]))
