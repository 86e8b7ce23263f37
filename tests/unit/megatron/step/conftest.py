from collections.abc import Callable
from typing import Any

import pytest
from step_batches import MODEL

from nemo_rl_offload.megatron.build.model import MegatronModel, build_model


@pytest.fixture
def build(process_group: None, make_policy: Callable[..., Any]) -> Callable[[], MegatronModel]:
    policy = make_policy(
        "scheduler.lr_warmup_iters=0",
        "optimizer.lr=0.25",
        "optimizer.optimizer=sgd",
        "fine_grained_activation_offloading=false",
    )
    return lambda: build_model(policy, MODEL, num_steps=4)
