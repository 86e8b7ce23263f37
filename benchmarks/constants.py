"""What the workloads and the predictions of them share, without torch."""

LOGPROB_CHUNK_SIZE = 1024
"""Tokens whose log-probabilities E2 to E4 compute at a time."""
NUM_AHEAD = 4
"""Microbatches in flight in E1, on the first of four stages."""
MODEL = "Qwen/Qwen2.5-7B"
"""Whose layers E2 to E4 train, where nothing else is said."""
SMALL_VOCABULARY = 8192
"""Of E2 to E4, so that layers rather than logits make the peak."""
OPTIMIZERS = ("device", "host", "Megatron's on the host")
"""Where main weights and Adam's state are: streamed from the host by this project, or updated there by Megatron."""
