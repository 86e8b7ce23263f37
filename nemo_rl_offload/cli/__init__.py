"""The command `nemo-rl-offload`: a file a command."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see `command_line.main`."""
    from nemo_rl_offload.cli import command_line

    return command_line.main(arguments)
