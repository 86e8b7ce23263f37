"""Stands in front of Transformer Engine, whose optimizers need a GPU, where a test hides the GPUs."""

raise ModuleNotFoundError("hidden: this process is to find no GPU")
