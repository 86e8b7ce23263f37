"""What the workloads and the predictions of them share, without torch."""

LOGPROB_CHUNK_SIZE = 1024
"""Tokens whose log-probabilities E2 to E4 compute at a time."""
NUM_AHEAD = 4
"""Microbatches in flight in E1, on the first of four stages."""
SMALL_VOCABULARY = 8192
"""Of E2 to E4, so that layers rather than logits make the peak."""
