"""What training needs is away between two steps: the next steps have the bits of steps that nothing left in between."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from models import make_policy, same_tensors, take_step, weights_of
from optimizer_cases import state_of

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.policy.residency import away_state
from nemo_rl_offload.policy.residency.away_state import MARGIN_BYTES, AwayState
from nemo_rl_offload.policy.residency.gradients import restore_gradients
from nemo_rl_offload.policy.residency.kept_weights import lasting_tensors
from nemo_rl_offload.policy.residency.megatron_optimizer import keep_what_waits_on_host
from nemo_rl_offload.policy.residency.model_tensors import resident_bytes

NEEDED_BYTES = 1000
TRAINS = ("optimizer.lr=1e-2", "scheduler.lr_warmup_iters=0", "moe_aux_loss_coeff=0", "transformer_impl=torch")
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
BIASES = "model_overrides={moe_router_bias_update_rate: 1.0}"
LORA = ("peft.enabled=true", "peft.dim=4")


def bytes_of(model: MegatronModel) -> int:
    return sum(each.untyped_storage().nbytes() for each in lasting_tensors(model.modules))


@pytest.mark.usefixtures("any_device_process_group")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", ()),
        ("qwen2", (DISTRIBUTED, ".precision=bfloat16")),
        ("qwen2", ("optimizer.use_distributed_optimizer=false", ".precision=bfloat16")),
        ("qwen2", ("optimizer.optimizer=sgd", "optimizer.use_distributed_optimizer=false")),
        pytest.param("deepseek_v3", (DISTRIBUTED, BIASES), marks=pytest.mark.slow),
        ("qwen3_moe", LORA),
    ],
    ids=["tied, float32", "one buffer, bfloat16", "bfloat16", "sgd", "experts with biases", "adapters"],
)
def test_no_bit_changes(
    family: str, overrides: tuple[str, ...], model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(*TRAINS, *overrides)
    stays, leaves = (build_model(policy, model_folder(family), num_steps=6) for _ in range(2))
    arena, draw = HostArena(make_backend(), 1 << 28), random.Random(3)
    away = AwayState(arena, leaves)
    whole_bytes = bytes_of(leaves)
    for step in range(4):
        for wanted in (0, 1, 2):
            enough = NEEDED_BYTES + MARGIN_BYTES
            monkeypatch.setattr(away_state, "free_device_bytes", lambda free=enough * (wanted == 0): free)
            is_away = away.make_room(NEEDED_BYTES, keeps_weights=True)
            assert bytes_of(leaves) == whole_bytes
            monkeypatch.setattr(away_state, "free_device_bytes", lambda free=enough * (wanted < 2): free)
            is_away |= away.make_room(NEEDED_BYTES)
            assert is_away if wanted == 2 else bytes_of(leaves) == whole_bytes
            assert (is_away, arena.held_bytes > 0) != (True, False)
            assert (bytes_of(leaves) < whole_bytes // 2) == (wanted == 2)
            if draw.random() < 0.5:
                away.bring_weights()
                assert bytes_of(leaves) == whole_bytes
            away.bring_all()
            restore_gradients(leaves)
        assert take_step(leaves, step) == take_step(stays, step)
        assert same_tensors(weights_of(leaves), weights_of(stays))
        assert all(torch.equal(*pair) for pair in zip(state_of(leaves), state_of(stays), strict=True))
    assert away.num_bytes == arena.held_bytes > 0
    arena.close()


@pytest.mark.usefixtures("megatron_process_group")
def test_nothing_leaves_without_a_gpu_or_need(model_folder: Callable[[str], Path]) -> None:
    away = AwayState(HostArena(make_backend(), 1 << 20), build_model(make_policy(), model_folder("qwen2"), num_steps=6))
    assert not away.make_room(1 << 40)
    assert away.num_bytes == 0


@pytest.mark.usefixtures("megatron_process_group")
def test_a_budget_without_room_is_named(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away_state, "free_device_bytes", lambda: 0)
    away = AwayState(HostArena(make_backend(), 1 << 12), build_model(make_policy(), model_folder("qwen2"), num_steps=6))
    with pytest.raises(ConfigError, match=r"host_memory_budget: .* has no room for what leaves the GPU between"):
        away.make_room(1)


@pytest.mark.usefixtures("any_device_process_group")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"weights": 4, "gradients": 4, "optimizer": 8}),
        ((DISTRIBUTED, ".precision=bfloat16"), {"weights": 2, "gradients": 4, "optimizer": 12}),
        ((".precision=bfloat16", "optimizer.optimizer=sgd"), {"weights": 2, "gradients": 4, "optimizer": 8}),
        ((DISTRIBUTED, ".precision=bfloat16", "optimizer.optimizer_cpu_offload=true"), {"weights": 2, "gradients": 4}),
    ],
    ids=["float32", "bfloat16", "sgd", "optimizer on the host"],
)
def test_what_stands_on_the_device_by_class(
    overrides: tuple[str, ...], expected: dict[str, int], model_folder: Callable[[str], Path]
) -> None:
    """Bytes a parameter, but for what fills buffers up and single numbers."""
    policy, arena = make_policy(*TRAINS, *overrides), HostArena(make_backend(), 1 << 28)
    keep = partial(keep_what_waits_on_host, policy, arena)
    model = build_model(policy, model_folder("qwen2"), num_steps=6, keep_optimizer=keep)
    take_step(model, 0)
    found = resident_bytes(model, arena)
    count = sum(weight.numel() for module in model.modules for weight in module.parameters())
    assert {name: size / count for name, size in found.items() if size > count / 10} == pytest.approx(
        expected, rel=0.03
    )
    arena.close()
