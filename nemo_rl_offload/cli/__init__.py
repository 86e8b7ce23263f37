"""The command `nemo-rl-offload`, a file a command."""
