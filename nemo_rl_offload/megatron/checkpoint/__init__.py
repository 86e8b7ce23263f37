"""Megatron distributed checkpoints."""
