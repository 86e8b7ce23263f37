"""Entropy, chosen log-probabilities and top-k over a vocabulary split in two are those of the whole one."""

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor

NUM_RANKS, NUM_TOKENS = 2, 12


def whole_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, token ids, and weights that make a loss of the results; float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, NUM_TOKENS, generator=generator, dtype=torch.float64) * 4
    ids = torch.randint(0, NUM_TOKENS, (2, 3, 5), generator=generator)
    return logits, ids, torch.rand(2, 3, generator=generator, dtype=torch.float64)


def _in_chunks(part: Tensor, ids: Tensor, weights: Tensor, chunk_size: int | None) -> tuple[Tensor, ...]:
    """A loss of entropy and log-probabilities, and its gradient; the ranks sum anew in the backward pass."""
    from nemo_rl_offload.megatron.step.head import gather_logprobs, map_logit_chunks, token_entropy

    entropy = map_logit_chunks(token_entropy, part, temperature=0.7, chunk_size=chunk_size)
    logprobs = map_logit_chunks(gather_logprobs, part, ids, temperature=0.7, chunk_size=chunk_size)
    loss = (weights * entropy).sum() + (weights[..., None] * logprobs).sum()
    return loss, *torch.autograd.grad(loss, part)


def worker(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support
    from nemo_rl_offload.megatron.step.head import gather_logprobs, token_entropy, topk_logits

    install_cpu_support()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=NUM_RANKS)
    logits, ids, weights = whole_logits()
    part = logits.chunk(NUM_RANKS, dim=-1)[rank].clone().requires_grad_()
    entropy, logprobs = token_entropy(part), gather_logprobs(part, ids)
    (gradient,) = torch.autograd.grad((weights * entropy).sum() + (weights[..., None] * logprobs).sum(), part)
    whole, chunked = (_in_chunks(part, ids, weights, chunk_size) for chunk_size in (None, 1))
    torch.testing.assert_close(chunked, whole)
    assert whole[1].abs().max() > 0.1
    top = topk_logits(part.detach(), 4, num_tokens=NUM_TOKENS - 2)
    torch.save([entropy.detach(), logprobs.detach(), gradient, *top], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_split_vocabulary(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(worker, (port, str(tmp_path)), NUM_RANKS, start_method="spawn")
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_RANKS)]

    logits, ids, weights = whole_logits()
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    entropy, chosen = -(logprobs.exp() * logprobs).sum(-1), logprobs.gather(-1, ids)
    (gradient,) = torch.autograd.grad((weights * entropy).sum() + (weights[..., None] * chosen).sum(), logits)
    top = logits.detach()[..., : NUM_TOKENS - 2].topk(4, dim=-1)
    for result in results:
        torch.testing.assert_close(result[:2], [entropy.detach(), chosen.detach()])
        assert torch.equal(result[3], top.values)
        assert torch.equal(result[4], top.indices)
    torch.testing.assert_close(torch.cat([result[2] for result in results], dim=-1), gradient)
