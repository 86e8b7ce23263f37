"""The command `nemo-rl-offload`: a file a command."""

import signal
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `command_line.main`."""
    from nemo_rl_offload.cli import command_line

    code = command_line.main(arguments)
    if code == command_line.EXIT_INTERRUPTED:  # once more would end Python at its end, with another code
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return code
