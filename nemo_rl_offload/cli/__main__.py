"""`python -m nemo_rl_offload.cli`."""

import sys

from nemo_rl_offload.cli import main

sys.exit(main())
