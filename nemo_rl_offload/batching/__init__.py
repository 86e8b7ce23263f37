"""Batches of token sequences: padding, sharding, microbatches."""
