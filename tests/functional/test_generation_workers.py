"""Generation in workers of its own samples what the training workers would have sampled, laid out alike or not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_processes import cpu_cluster
from patience import PATIENCE_S
from safetensors.torch import load_file
from test_grpo_run import metrics, saved_state, start_run, wait_until_gone

from nemo_rl_offload.cluster.virtual_cluster import ClusterPart
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.interface import GeneratorSetup
from nemo_rl_offload.generation.megatron_generator import MegatronGenerator
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.policy.driver import Policy
from nemo_rl_offload.policy.model_workers import ModelWorkers
from nemo_rl_offload.policy.worker import PolicyWorker

COLOCATED = "policy.generation.colocated"
STAGES = ("pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=1")


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("settings", [(), STAGES], ids=["one", "pipeline"])
def test_a_run_does_not_depend_on_who_generates(settings: tuple[str, ...], tmp_path: Path) -> None:
    num_workers = 2 if settings else 1
    layout = [f"policy.megatron_cfg.{setting}" for setting in settings]
    apart = [f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node={num_workers}"]
    for name, overrides in (
        ("together", [f"cluster.gpus_per_node={num_workers}"]),
        ("apart", [f"cluster.gpus_per_node={2 * num_workers}", *apart]),
    ):
        process = start_run(tmp_path / name, *layout, *overrides, mark=str(tmp_path))
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        wait_until_gone(str(tmp_path))
    expected, found = (metrics(tmp_path / name) for name in ("together", "apart"))
    assert expected[1, "train"]["grad_norm"] > 0, "there are weights to hand over"
    for key, values in expected.items():
        of_both = [
            {name: value for name, value in each.items() if not name.startswith(("memory", "offload/peak"))}
            for each in (values, found[key])
        ]
        assert of_both[0] == of_both[1]
    assert saved_state(tmp_path / "together") == saved_state(tmp_path / "apart")


TP, PP = (f"{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline"))
END_ID, SEED, SAMPLING = 1, 5, Sampling(12)


def laid_out(*settings: str) -> Any:
    changes = ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=2"]
    fixed = ("fine_grained_activation_offloading=false", "optimizer.lr=0.01", "scheduler.lr_warmup_iters=0")
    changes += [f"policy.megatron_cfg.{setting}" for setting in (*fixed, *settings)]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", changes)["policy"]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("layout", [TP, PP])
def test_a_group_of_another_layout_samples_with_the_trained_weights(
    layout: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_folder("qwen2")
    prompts = [[number, 40, 41, 42][: 1 + number % 4] for number in range(3, 9)]
    batch = {
        "input_ids": torch.randint(3, 250, (4, 12), generator=torch.Generator().manual_seed(0)),
        "input_lengths": torch.full((4,), 12),
        "token_mask": torch.ones(4, 12),
        "sample_mask": torch.ones(4),
    }
    start: Any = partial(ModelWorkers, seed=SEED, num_steps=None, keep_reference=False)
    with cpu_cluster(4) as cluster:
        slots = [ClusterPart(cluster, 0, 1, *part) for part in ((0, 2), (2, 1), (3, 1))]
        policy = Policy(slots[0], laid_out(layout), model, (END_ID,), seed=SEED, num_steps=2, keep_reference=False)
        start_here = partial(start, model_path=model)
        setup = GeneratorSetup(laid_out(), (END_ID,), model, slots[0], slots[1], start_here)
        generator = MegatronGenerator(setup)
        generator.prepare()
        generator.start(policy._trainers)
        with_start_weights = generator.generate(prompts, SEED, SAMPLING)
        policy.train(batch, "nll", {})
        generator.update_weights(policy._trainers)
        responses = generator.generate(prompts, SEED, SAMPLING)
        assert responses != with_start_weights

        policy.export_hf(tmp_path / "trained")
        own_workers: Any = generator._own_workers
        own_workers.workers.run_all(PolicyWorker.export_hf, tmp_path / "generator")
        trained, held = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "generator"))
        assert trained.keys() == held.keys()
        assert all(torch.equal(trained[name], held[name]) for name in trained)
        colocated = start(slots[2], laid_out(), tmp_path / "trained")
        assert colocated.generate(prompts, SEED, (END_ID,), SAMPLING) == responses
        generator.stop()
        generator.stop()
        policy.shutdown()
