"""`auto`: a budget instead of a list of modules."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl_offload import offload_activations
from nemo_rl_offload.errors import ConfigError


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, attn_implementation="sdpa", **shape))


def gradients(model: LlamaForCausalLM, length: int) -> list[torch.Tensor]:
    model.zero_grad()
    tokens = torch.arange(2 * length).view(2, length) % 64
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("budget", "offloads"), [("300KiB", True), ("1GiB", False)])
def test_auto_is_bit_identical_and_offloads_what_the_budget_asks_for(budget: str, offloads: bool) -> None:
    model = tiny_llama()
    lengths = [32, 32, 24, 32, 16, 32, 32]
    expected = [gradients(model, length) for length in lengths]
    moved = []
    with offload_activations(model, "auto", gpu_memory_budget=budget, min_tensor_bytes=0) as offload:
        for length, reference in zip(lengths, expected, strict=True):
            before = offload.stats().bytes_out
            assert all(map(torch.equal, gradients(model, length), reference))
            offload.end_step()
            moved.append(offload.stats().bytes_out - before)
    assert moved[0] > 0
    assert (moved[-1] > 0) == offloads


def test_auto_and_a_budget_need_each_other() -> None:
    model = tiny_llama()
    for modules, budget in (("auto", None), (["core_attn"], "1GiB")):
        with pytest.raises(ConfigError, match="need each other"):
            offload_activations(model, modules, gpu_memory_budget=budget)
    with pytest.raises(ConfigError, match="no decoder layers"):
        offload_activations(torch.nn.Linear(2, 2), "auto", gpu_memory_budget="1GiB")
