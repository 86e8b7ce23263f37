"""What lasts of a model, and where there is no room for it."""

import pytest
import torch
from torch import nn

from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.offload.waiting_weights import DepartingWeights, WaitingWeights
from nemo_rl_offload.policy.residency import kept_weights
from nemo_rl_offload.policy.residency.kept_weights import keep_weights, lasting_tensors


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8, bias=False)
        self.register_buffer("bias", torch.zeros(8))
        self.register_buffer("counts", torch.zeros(8), persistent=False)


def test_buffers_that_are_saved_last() -> None:
    router = Router()
    found = lasting_tensors([router, nn.ModuleList([nn.LayerNorm(4)])])
    assert [tuple(each.shape) for each in found] == [(8, 64), (4,), (4,), (8,)]
    assert found[0] is router.linear.weight
    assert found[-1] is router.bias


@pytest.mark.parametrize("kind", [WaitingWeights, DepartingWeights])
def test_a_budget_without_room_is_told_with_the_key(kind: type[WaitingWeights]) -> None:
    arena = HostArena(HostBackend(), 1024)
    with pytest.raises(
        ConfigError, match=r"^policy\.megatron_cfg\.activation_offload\.host_memory_budget: .* reference's"
    ):
        keep_weights(kind, arena, [Router()], "reference's")
    assert arena.held_bytes == 0


@pytest.mark.parametrize(("num_ranks", "fits"), [(1, True), (4, True), (5, False)])
def test_a_machine_without_memory_for_all_its_ranks_is_told_before_any_is_taken(
    num_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(kept_weights, "free_host_bytes", lambda: 4 * (8 * 64 + 8) * 4)
    arena = HostArena(HostBackend(), 1 << 20)
    if fits:
        assert keep_weights(WaitingWeights, arena, [Router()], "reference's").num_bytes == arena.held_bytes > 0
        return
    with pytest.raises(ResourceError, match=r"the reference's weights need \S+ KiB of host memory on each of 5 ranks"):
        keep_weights(WaitingWeights, arena, [Router()], "reference's")
    assert arena.held_bytes == 0
