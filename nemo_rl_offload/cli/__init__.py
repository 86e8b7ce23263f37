"""The command `nemo-rl-offload`: a file a command."""

import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

OF_TRAINING = ("pydantic", "hydra", "omegaconf", "rich")
"""Modules of the extra `train` that every command imports."""
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `command_line.main`. With the engine alone installed, it says what else to install."""
    if lacking := [name for name in OF_TRAINING if find_spec(name) is None]:
        print(
            f"error: {', '.join(lacking)} cannot be found: what trains is not installed. In the project's folder, "
            "`uv run nemo-rl-offload ...` brings it; into an environment, `uv sync --extra train`.",
            file=sys.stderr,
        )
        return 2
    try:
        from nemo_rl_offload.cli import command_line

        code = command_line.main(arguments)
    except KeyboardInterrupt:  # before a command has begun
        print("Interrupted.", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:  # once more would end Python at its end, with another code
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return code
