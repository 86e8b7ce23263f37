"""Megatron's layers in plain torch, and regions inside them."""
