"""Buckets from one process to others over a channel, here of threads and gloo."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nemo_rl_offload.generation.weight_channel import OpenChannel, WeightChannel, join_channel
from nemo_rl_offload.generation.weight_sync import (
    Assembler,
    SentBucket,
    WeightExport,
    cut_into_buckets,
    num_bytes_of,
)

WEIGHTS = {
    "large": torch.arange(300, dtype=torch.float32).view(3, 100),
    "small": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "number": torch.tensor(7, dtype=torch.int64),
    "odd": torch.arange(5, dtype=torch.uint8),
}
BUCKET_BYTES = 500


def export(channel_buffer: torch.Tensor) -> WeightExport:
    """One of these weights, without a model."""
    made: Any = object.__new__(WeightExport)
    made._cuts = cut_into_buckets(WEIGHTS.items(), BUCKET_BYTES)
    made._buffer = channel_buffer
    return made


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_every_receiver_gets_every_bit(num_receivers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    opened = OpenChannel(num_receivers)
    with ThreadPoolExecutor(num_receivers) as pool:
        joining = [pool.submit(join_channel, opened.address, each, num_receivers) for each in range(num_receivers)]
        channels = [each.result() for each in joining]
        for _ in range(2):  # two updates over one channel
            assert_sent(opened.channel, channels, pool)


def assert_sent(sender: WeightChannel, channels: list[WeightChannel], pool: ThreadPoolExecutor) -> None:
    sent, found = export(torch.zeros(BUCKET_BYTES, dtype=torch.uint8)), [dict[str, torch.Tensor]() for _ in channels]
    assemblers, num_buckets = [Assembler() for _ in channels], 0
    while (parts := sent.next_sent_bucket(sender)) is not None:
        buffers = [torch.full((num_bytes_of(parts),), 255, dtype=torch.uint8) for _ in channels]
        list(pool.map(lambda channel, buffer: channel.receive(buffer), channels, buffers))
        for assembler, buffer, weights in zip(assemblers, buffers, found, strict=True):
            weights |= assembler.add(SentBucket(parts, buffer))
        num_buckets += 1
    assert num_buckets == 3
    for weights in found:
        assert list(weights) == list(WEIGHTS)
        for name, weight in WEIGHTS.items():
            assert weights[name].dtype == weight.dtype
            assert torch.equal(weights[name], weight), name


def test_ranks_without_an_end_go_through_the_same_buckets() -> None:
    quiet = export(torch.zeros(BUCKET_BYTES, dtype=torch.uint8))
    seen = []
    while (parts := quiet.next_sent_bucket(None)) is not None:
        seen.append(num_bytes_of(parts))
    assert seen == [500, 500, 217]


def test_a_sender_that_cannot_connect_says_so_when_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no way")

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("nemo_rl_offload.generation.weight_channel.WeightChannel", refuse)
    with pytest.raises(RuntimeError, match="no way"):
        _ = OpenChannel(1).channel
