"""What each context-parallel rank computes of its heads of a recurrent layer, against all heads at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from models import make_policy

from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.layers.recurrent_mixer import RecurrentMixer, divide_heads

pytestmark = pytest.mark.usefixtures("megatron_process_group")


# The groups of heads on a rank: one whole, one that two or four ranks share.
@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [*(("nemotron_h", number) for number in (2, 4, 8)), ("qwen3_5_text", 2), ("qwen3_5_text", 4)],
)
def test_the_ranks_heads_are_together_what_all_heads_give(
    family: str, num_ranks: int, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(make_policy(), model_folder(family), num_steps=None).modules[0]
    mixer = next(module for module in model.modules() if isinstance(module, RecurrentMixer))
    gate = mixer.part_names.index("z")
    parts, heads = ([*each[:gate], *each[gate + 1 :]] for each in (mixer.parts, mixer.heads))
    inputs = torch.randn(2, 9, sum(parts), generator=torch.Generator().manual_seed(0))
    parameters = [each for name, each in mixer.named_parameters(recurse=False) if "norm" not in name]
    assert len(parameters) > 2
    expected = mixer._rows(inputs, None)
    expected_gradients = torch.autograd.grad(expected.square().sum(), parameters)
    shares = divide_heads(torch.split(inputs, parts, dim=-1), heads, num_ranks, dim=2)
    monkeypatch.setattr(mixer.config, "context_parallel_size", num_ranks)
    outputs = []
    for rank, share in enumerate(shares):
        with monkeypatch.context() as patch:
            patch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
            outputs.append(mixer._rows(share, None))
    found = torch.cat(outputs, dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(found.square().sum(), parameters)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
