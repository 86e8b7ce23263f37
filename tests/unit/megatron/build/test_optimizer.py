"""Every key reaches Megatron's optimizer, schedule and data parallelism; its refusals are ours."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build import optimizer as optimizer_setup

MakePolicy = Callable[..., Any]

OPTIMIZER = {
    "optimizer": "sgd",
    "lr": 0.5,
    "min_lr": 0.25,
    "weight_decay": 0.125,
    "adam_beta1": 0.5,
    "adam_beta2": 0.75,
    "adam_eps": 0.01,
    "sgd_momentum": 0.375,
    "clip_grad": 2.5,
    "use_distributed_optimizer": True,
}
OF_RESIDENCY = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
NEEDS_TRANSFORMER_ENGINE = {"use_precision_aware_optimizer"}


@pytest.mark.parametrize(("key", "value"), OPTIMIZER.items())
def test_optimizer_keys(key: str, value: object, make_policy: MakePolicy) -> None:
    policy = make_policy(f"optimizer.{key}={str(value).lower()}")
    assert getattr(optimizer_setup.optimizer_config(policy), key) == value
    assert (
        policy["megatron_cfg"]["optimizer"].keys() == OPTIMIZER.keys() | OF_RESIDENCY.keys() | NEEDS_TRANSFORMER_ENGINE
    )
    assert optimizer_setup.optimizer_config(policy | {"precision": "bfloat16"}).bf16


def test_megatron_is_told_nothing_of_an_optimizer_on_the_host(make_policy: MakePolicy) -> None:
    policy = make_policy(*(f"optimizer.{key}={str(value).lower()}" for key, value in OF_RESIDENCY.items()))
    config = optimizer_setup.optimizer_config(policy)
    assert (config.optimizer_cpu_offload, config.optimizer_offload_fraction) == (False, 0.0)


@pytest.mark.parametrize("key", ["grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather"])
@pytest.mark.parametrize("value", [True, False])
def test_data_parallel_keys(key: str, value: bool, make_policy: MakePolicy) -> None:
    section = "distributed_data_parallel_config"
    distributed = ("optimizer.use_distributed_optimizer=true", f"{section}.overlap_grad_reduce=true")
    policy = make_policy(*distributed, f"{section}.{key}={str(value).lower()}")
    config = optimizer_setup.ddp_config(policy)
    assert getattr(config, key) is value
    assert config.use_distributed_optimizer


def test_optimizer_without_transformer_engine_is_refused(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", None)
    policy = make_policy("optimizer.use_precision_aware_optimizer=true", "optimizer.use_distributed_optimizer=true")
    with pytest.raises(ConfigError, match=r"^policy.megatron_cfg.optimizer: Megatron-Core refuses .*FusedAdam"):
        optimizer_setup.optimizer_config(policy)


def test_weight_decay_over_the_steps(make_policy: MakePolicy) -> None:
    keys = ("start_weight_decay=0.1", "end_weight_decay=0.5", "weight_decay_incr_style=linear", "lr_warmup_iters=0")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}])
    scheduler = optimizer_setup.learning_rate_scheduler(
        make_policy(*(f"scheduler.{key}" for key in keys)), optimizer, 4
    )
    decays = []
    for _ in range(6):
        decays.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step(increment=1)
    assert decays == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


SCHEDULES = [
    (("lr_decay_style=constant",), [1.0] * 6),
    (("lr_warmup_iters=2", "lr_warmup_init=0.5"), [0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
    (("lr_decay_style=linear",), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
    (("lr_decay_style=linear", "lr_warmup_iters=2"), [0.0, 0.5, 1.0, 0.6, 0.2, 0.2]),
    (("lr_decay_style=cosine", "lr_decay_iters=2"), [1.0, 0.6, 0.2, 0.2, 0.2, 0.2]),
    (("lr_warmup_iters=9", "lr_decay_style=cosine"), [0.0, 1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
]


@pytest.mark.parametrize(("overrides", "expected"), SCHEDULES)
def test_learning_rates(overrides: tuple[str, ...], expected: list[float], make_policy: MakePolicy) -> None:
    defaults = ("lr_warmup_iters=0", "lr_decay_style=constant")
    policy = make_policy(
        "optimizer.lr=1.0",
        "optimizer.min_lr=0.2",
        "optimizer.weight_decay=0.3",
        *(f"scheduler.{override}" for override in (*defaults, *overrides)),
    )
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}])
    scheduler = optimizer_setup.learning_rate_scheduler(policy, optimizer, num_steps=4)
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
        scheduler.step(increment=1)
    assert rates == pytest.approx(expected)
