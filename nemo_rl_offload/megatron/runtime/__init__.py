"""Process groups, CPUs and what Megatron needs where there is no GPU."""
