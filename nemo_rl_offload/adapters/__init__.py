"""The engine inside other programs: any torch module, transformers' Trainer, Megatron-Core."""
