"""What is said when a step finds no device memory."""

import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.generation import megatron_sampling as generation_module
from nemo_rl_offload.megatron.step import log_probabilities as log_probabilities_module
from nemo_rl_offload.megatron.step import train_step as train_step_module
from nemo_rl_offload.planner.job import read_job
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak, run_steady_state
from nemo_rl_offload.policy import out_of_memory as module
from nemo_rl_offload.policy.out_of_memory import DeviceUse, Phase, out_of_memory, out_of_memory_while
from nemo_rl_offload.policy.worker import PolicyWorker
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import find_device

GIB = 1 << 30
H100 = DeviceUse("NVIDIA H100 80GB HBM3", 79 * GIB, 77 * GIB)
LARGE = (
    "policy.model_name=Qwen/Qwen2.5-1.5B",
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=8192",
    "policy.train_micro_batch_size=8",
    "policy.megatron_cfg.offload_modules=[core_attn]",
    "policy.megatron_cfg.min_offloaded_tensor_size=1048576",
)


def policy(*overrides: str) -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*LARGE, *overrides])["policy"]


def test_names_the_peak_the_largest_module_and_what_to_change() -> None:
    error = str(out_of_memory(policy(), Path("nowhere"), 1, H100))
    assert "torch held up to 77.0 GiB of the 79.0 GiB of this NVIDIA H100 80GB HBM3" in error
    # 28 layers x 65536 tokens x 2 widths of 8960 x 2 bytes: the largest by far.
    assert "Most of what stays there for the backward pass is mlp_act's: 61.25 GiB" in error
    assert "To need a tenth less: train_micro_batch_size=2 or " in error  # the planner says that 4 would not do
    assert len(error.splitlines()) == 1


def test_one_sample_at_a_time_is_not_halved() -> None:
    error = str(out_of_memory(policy("policy.train_micro_batch_size=1"), Path("nowhere"), 1, H100))
    assert "train_micro_batch_size=" not in error
    assert "To need a tenth less: " in error


def test_a_small_job_can_shrink_though_what_the_runtime_takes_cannot() -> None:
    small = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", [])["policy"]
    error = str(out_of_memory(small, Path(PROJECT_ROOT, small["model_name"]), 1, replace(H100, peak_bytes=48 << 20)))
    assert "torch held up to 0.047 GiB of the 79.0 GiB" in error
    assert " or train_micro_batch_size=16." in error
    assert "comes nearest" not in error


COUNTED = ("recompute_granularity=selective", "recompute_modules=[mlp_fc1,mlp_act]", "recompute_num_layers=24")
FOUR = ("tensor_model_parallel_size=4", "sequence_parallel=true")
WHOLE = (
    "offload_modules=null",
    "fine_grained_activation_offloading=false",
    "recompute_granularity=full",
    "recompute_method=uniform",
    "recompute_num_layers=1",
)
NULLS = ("recompute_granularity=null", "recompute_modules=null")


@pytest.mark.parametrize(
    ("model", "sequence", "settings"),
    [
        ("Qwen/Qwen2.5-1.5B", 8192, ()),
        ("Qwen/Qwen2.5-1.5B", 8192, ("activation_checkpointing=false", *NULLS)),
        ("Qwen/Qwen2.5-7B", 32768, (*COUNTED, *FOUR)),
        ("Qwen/Qwen2.5-1.5B", 16384, ("offload_modules=auto", 'activation_offload.gpu_memory_budget="55GiB"')),
        ("meta-llama/Llama-3.1-8B", 131072, (*WHOLE, *FOUR)),
    ],
)
def test_what_it_proposes_is_other_than_what_is_in_force_and_needs_less(
    model: str, sequence: int, settings: tuple[str, ...]
) -> None:
    """Each of the keys that it names differs, and `check` lets the whole pass."""
    own = [f"policy.megatron_cfg.{text}" for text in settings]
    given = [f"policy.model_name={model}", "policy.train_micro_batch_size=1", "policy.logprob_chunk_size=256", *own]
    given.append(f"policy.max_total_sequence_length={sequence}")
    world = 4 if FOUR[0] in settings else 1
    before = policy(*given)
    error = str(out_of_memory(before, Path("nowhere"), world, H100))
    proposal = error.partition("To need a tenth less: ")[2].partition(" or ")[0].rstrip(".")
    changes = re.split(r", (?![a-z_0-9]*[,\]])| and ", proposal)
    paths = [f"megatron_cfg.{text}" for text in changes]
    after = policy(*given, *(f"policy.{text}" for text in paths))
    jobs = [read_job(each, load_model_shape(model, None), find_device("h100"), world) for each in (before, after)]
    peaks = [highest_peak(run_steady_state(job, job.offload_modules)) for job in jobs]
    assert after != before
    assert "offload_modules=auto" in (*settings, *changes) or peaks[1] < 0.95 * peaks[0]
    for change in paths:
        assert policy(*given, f"policy.{change}") != before, f"{change} is in force already"
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [])
    examined = examine(
        {**config, "policy": after, "cluster": {**config["cluster"], "gpus_per_node": world}}, run_here=False
    )
    assert not examined.problems
    assert not [warning for warning in examined.warnings if "recompute" in warning.path]


def test_numbers_of_a_proposal_are_not_truth_values() -> None:
    keys = {"recompute_num_layers": 1, "activation_offload_fraction": 1.0, "delta": 0, "enabled": True, "method": None}
    assert list(module._differing(keys, dict.fromkeys(keys, 7))) == [
        "recompute_num_layers=1",
        "activation_offload_fraction=1.0",
        "delta=0",
        "enabled=true",
        "method=null",
    ]


def test_packs_are_made_smaller_by_their_tokens() -> None:
    packs = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=65536")
    error = str(out_of_memory(policy(*packs), Path("nowhere"), 1, H100))
    assert "train_mb_tokens=16384" in error
    assert "train_micro_batch_size" not in error


def test_an_unknown_device_or_model_gets_what_holds_for_all() -> None:
    error = str(out_of_memory(policy(), Path("nowhere"), 1, DeviceUse("Abacus", 8 * GIB, 8 * GIB)))
    assert "Offload more modules, or use smaller microbatches (the device Abacus is not" in error
    error = str(out_of_memory(policy("policy.model_name=mine"), Path("nowhere"), 1, H100))
    assert "use smaller microbatches ('mine' is neither" in error


DIVIDE = "tensor_model_parallel_size or pipeline_model_parallel_size in policy.megatron_cfg divide it among more GPUs"
PACKS = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.logprob_mb_tokens=16384")
ONE = ("policy.logprob_batch_size=1", "policy.logprob_chunk_size=256")


@pytest.mark.parametrize(
    ("phase", "settings", "ways"),
    [
        (
            "loading the model",
            (),
            f"{DIVIDE}; optimizer.use_distributed_optimizer there divides the optimizer's state",
        ),
        (
            "loading the model",
            ("policy.megatron_cfg.optimizer.use_distributed_optimizer=true",),
            DIVIDE,
        ),
        (
            "evaluating",
            (),
            "a lower policy.train_micro_batch_size (it is 8); policy.logprob_chunk_size, for logits in chunks of so "
            "many tokens",
        ),
        ("generating", PACKS, "a lower policy.generation_batch_size (it is 128)"),
        (
            "computing log-probabilities",
            (*PACKS, "policy.logprob_chunk_size=256"),
            "a lower policy.sequence_packing.logprob_mb_tokens (it is 16384), where the longest sample takes less",
        ),
        (
            "computing log-probabilities",
            ONE,
            "policy.megatron_cfg.tensor_model_parallel_size divides it among more GPUs",
        ),
    ],
)
def test_other_phases_name_what_makes_them_smaller(phase: Phase, settings: tuple[str, ...], ways: str) -> None:
    expected = (
        f"out of device memory while {phase}: torch held up to 77.0 GiB of the 79.0 GiB of this NVIDIA H100 80GB "
        f"HBM3. What needs less: {ways}."
    )
    assert str(out_of_memory_while(phase, policy(*settings), H100)) == expected


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> PolicyWorker:
    """One on a full H100, where everything that needs memory fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for name in ("train_step", "evaluate"):
        monkeypatch.setattr(train_step_module, name, fail)
    for name in ("compute_logprobs", "compute_topk_logits"):
        monkeypatch.setattr(log_probabilities_module, name, fail)
    monkeypatch.setattr(generation_module, "generate", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, H100.total_bytes))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: H100.peak_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100.name)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    found = PolicyWorker.__new__(PolicyWorker)
    found._policy, found._model_path = policy(), Path("nowhere")
    found._model = types.SimpleNamespace(gather_weights=lambda: None, modules=[])  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("method", "arguments", "doing"),
    [
        ("train", (None, "nll", {}, None), "in a training step"),
        ("evaluate", (None, "nll", {}, None), "while evaluating"),
        ("get_logprobs", (None,), "while computing log-probabilities"),
        ("get_topk_logits", (None, 4, 8), "while computing log-probabilities"),
        ("generate", ([], 1, 0), "while generating"),
    ],
)
def test_a_worker_translates_torchs_error(
    worker: PolicyWorker, method: str, arguments: tuple[Any, ...], doing: str
) -> None:
    with pytest.raises(ResourceError, match=rf"out of device memory {doing}: torch held up to 77\.0 GiB") as caught:
        getattr(worker, method)(*arguments)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
