"""What Transformer Engine keeps of weights in 8 bits is freed where an engine needs the room."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_rl_offload.policy.residency import away_state
from nemo_rl_offload.policy.residency.away_state import AwayState
from nemo_rl_offload.policy.residency.eight_bits import free_copies


def model_with_copies() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1]._fp8_workspaces = {"weight": torch.zeros(2, 2, dtype=torch.uint8)}
    return model


def test_copies_of_all_layers_are_freed() -> None:
    model = model_with_copies()
    free_copies([model])
    assert model[1]._fp8_workspaces == {}


@pytest.mark.parametrize(("free_bytes", "is_freed"), [(0, True), (1 << 40, False)])
def test_they_are_freed_where_room_is_lacking(free_bytes: int, is_freed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_copies()
    monkeypatch.setattr(away_state, "free_device_bytes", lambda: free_bytes)
    monkeypatch.setattr(away_state, "weight_tensors", lambda *_: [])
    of_megatron: Any = SimpleNamespace(modules=[model], optimizer=None)
    arena: Any = SimpleNamespace(backend=None)
    monkeypatch.setattr(away_state, "AwayTensors", lambda _: SimpleNamespace(are_away=True, num_bytes=0))
    AwayState(arena, of_megatron).make_room(1)
    assert (model[1]._fp8_workspaces == {}) == is_freed
