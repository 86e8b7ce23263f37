"""Losses and advantages: pure functions over tensors."""
