"""The shipped model, a batch for it, and a head of given logits."""

from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory, OutputHead
from nemo_rl_offload.megatron.step.microbatches import Microbatch

MODEL: Path = PROJECT_ROOT / "examples/models/tiny_speller"
NUM_SAMPLES, WIDTH = 5, 14


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([14, 3, 9, 6, 11])
    token_mask = (torch.arange(WIDTH) < lengths[:, None]) & (torch.rand(NUM_SAMPLES, WIDTH, generator=generator) < 0.7)
    return {
        "input_ids": torch.randint(0, 264, (NUM_SAMPLES, WIDTH), generator=generator),
        "input_lengths": lengths,
        "token_mask": token_mask.long(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
    }


def head_of(logits: Tensor, ids: Tensor, temperature: float, chunk_size: int | None = None) -> OutputHead:
    return LogitsHeadFactory(temperature, chunk_size).build(logits, Microbatch({"input_ids": ids}))
