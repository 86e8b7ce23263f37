"""Megatron-Core's offload interface on this project's engine."""
