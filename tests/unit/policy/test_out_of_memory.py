"""What is said when a step finds no device memory."""

import re
import types
from collections.abc import Iterator
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
from nemo_rl_offload.policy.out_of_memory import (
    DeviceUse,
    Phase,
    explained,
    out_of_memory,
    out_of_memory_while,
)
from nemo_rl_offload.policy.residency.phases import Counter, PhasePeaks
from nemo_rl_offload.policy.worker import PolicyWorker
from nemo_rl_offload.specs.allocator import EXPANDABLE as ON
from nemo_rl_offload.specs.allocator import VARIABLES
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import find_device
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory

GIB = 1 << 30
H100 = DeviceUse("NVIDIA H100 80GB HBM3", 79 * GIB, 77 * GIB)
LARGEST = "Qwen/Qwen2.5-1.5B"
LARGE = (
    f"policy.model_name={LARGEST}",
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=8192",
    "policy.train_micro_batch_size=8",
    "policy.megatron_cfg.offload_modules=[core_attn]",
    "policy.megatron_cfg.use_fused_linear_logprobs=false",
    "policy.megatron_cfg.min_offloaded_tensor_size=1048576",
)


def policy(*overrides: str) -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*LARGE, *overrides])["policy"]


def test_names_the_peak_the_largest_module_and_what_to_change() -> None:
    error = str(out_of_memory(policy("policy.logprob_chunk_size=256"), Path("nowhere"), 1, H100))
    assert "torch held up to 77.0 GiB of the 79.0 GiB of this NVIDIA H100 80GB HBM3" in error
    # 28 layers x 65536 tokens x 2 widths of 8960 x 2 bytes: the largest by far.
    assert "Most of what stays there for the backward pass is mlp_act's: 61.25 GiB" in error
    assert "To need a tenth less: policy.train_micro_batch_size=4 or " in error
    assert "logits" not in error
    assert len(error.splitlines()) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "named", "first"),
    [
        # 2 x 8192 tokens, with what is saved in bfloat16 and three times in float32.
        (
            ["train_micro_batch_size=2"],
            "16384 tokens by 151936 of the vocabulary: 32.46 GiB",
            "megatron_cfg.use_fused_linear_logprobs=true",
        ),
        (
            ["train_micro_batch_size=1"],
            "8192 tokens by 151936 of the vocabulary: 16.23 GiB",
            "megatron_cfg.use_fused_linear_logprobs=true",
        ),
        (
            ["train_micro_batch_size=8"],
            "65536 tokens by 151936 of the vocabulary: 129.83 GiB",
            "train_micro_batch_size=1",
        ),
        (
            ["sequence_packing.enabled=true", "sequence_packing.train_mb_tokens=32768"],
            "32768 tokens by 151936 of the vocabulary: 64.91 GiB",
            "sequence_packing.train_mb_tokens=8192",
        ),
        (
            [
                "train_micro_batch_size=2",
                "megatron_cfg.tensor_model_parallel_size=2",
                "megatron_cfg.sequence_parallel=true",
            ],
            "16384 tokens by 75968 of the vocabulary: 16.23 GiB",
            "megatron_cfg.use_fused_linear_logprobs=true",
        ),
    ],
)
def test_logits_are_named_first_where_they_are_the_most(given: list[str], named: str, first: str) -> None:
    world = 2 if len(given) == 3 else 1
    overrides = [f"policy.{text}" for text in given]
    error = str(out_of_memory(policy(*overrides), Path("nowhere"), world, H100))
    assert f"The most are a microbatch's logits and their loss, {named} by the planner's formulas. To need" in error
    proposals = error.partition("To need a tenth less: ")[2].removesuffix(".").split(" or ")
    assert proposals[0] == f"policy.{first}"
    assert len(proposals) == len({text.partition("=")[0] for text in proposals}), "each key once"
    before, after = (policy(*each) for each in (overrides, [*overrides, proposals[0]]))
    jobs = [read_job(each, load_model_shape(LARGEST, None), find_device("h100"), world) for each in (before, after)]
    peaks = [highest_peak(run_steady_state(job, job.offload_modules)) for job in jobs]
    assert peaks[1] < 0.95 * peaks[0]


def test_one_sample_at_a_time_is_not_halved() -> None:
    error = str(out_of_memory(policy("policy.train_micro_batch_size=1"), Path("nowhere"), 1, H100))
    assert "train_micro_batch_size=" not in error
    assert "To need a tenth less: " in error


def test_a_small_job_can_shrink_though_what_the_runtime_takes_cannot() -> None:
    small = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", [])["policy"]
    error = str(out_of_memory(small, Path(PROJECT_ROOT, small["model_name"]), 1, replace(H100, peak_bytes=48 << 20)))
    assert "torch held up to 0.047 GiB of the 79.0 GiB" in error
    assert "train_micro_batch_size=16" in error.partition("To need a tenth less: ")[2]
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


@pytest.mark.sampled(1)
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
    changes = proposal.split()
    after = policy(*given, *changes)
    jobs = [read_job(each, load_model_shape(model, None), find_device("h100"), world) for each in (before, after)]
    peaks = [highest_peak(run_steady_state(job, job.offload_modules)) for job in jobs]
    assert after != before
    assert any(text.endswith("offload_modules=auto") for text in (*settings, *changes)) or peaks[1] < 0.95 * peaks[0]
    for change in changes:
        assert policy(*given, change) != before, f"{change} is in force already"
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [])
    examined = examine(
        {**config, "policy": after, "cluster": {**config["cluster"], "gpus_per_node": world}}, run_here=False
    )
    assert not examined.problems
    assert not [warning for warning in examined.warnings if "recompute" in warning.path]


def test_numbers_of_a_proposal_are_not_truth_values() -> None:
    keys = {"recompute_num_layers": 1, "activation_offload_fraction": 1.0, "delta": 0, "enabled": True, "method": None}
    assert list(module._differing(keys, dict.fromkeys(keys, 7), section="")) == [
        "recompute_num_layers=1",
        "activation_offload_fraction=1.0",
        "delta=0",
        "enabled=true",
        "method=null",
    ]


@pytest.mark.slow
def test_packs_are_made_smaller_by_their_tokens() -> None:
    packs = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=65536")
    error = str(out_of_memory(policy(*packs), Path("nowhere"), 1, H100))
    assert "train_mb_tokens=8192 or" in error  # with 16384 it takes 92 GiB
    assert "train_micro_batch_size" not in error


@pytest.mark.parametrize(
    ("unused", "variables", "others", "said"),
    [
        (2 * GIB, {}, {}, ""),
        (8 * GIB, {VARIABLES[0]: ON}, {}, ""),
        (8 * GIB, {VARIABLES[1]: f"max_split_size_mb:9, {ON}"}, {}, ""),
        (8 * GIB, {VARIABLES[1]: ON.replace(":", " : ")}, {}, ""),
        (8 * GIB, {}, {}, f"'policy.megatron_cfg.env_vars={{{VARIABLES[0]}:{ON}}}'"),
        (8 * GIB, {}, {"A": 'a"b$c'}, f"policy.megatron_cfg.env_vars: {VARIABLES[0]}: {ON}"),
        (
            *(8 * GIB, {VARIABLES[1]: "max_split_size_mb:9"}, {}),
            f"policy.megatron_cfg.env_vars: {VARIABLES[1]}: max_split_size_mb:9,{ON}",
        ),
        (
            *(8 * GIB, {VARIABLES[0]: "max_split_size_mb:9", VARIABLES[1]: ON}, {}),
            f"policy.megatron_cfg.env_vars: {VARIABLES[0]}: max_split_size_mb:9,{ON}",
        ),
    ],
)
def test_memory_between_tensors_is_told_with_the_variable(
    unused: int, variables: dict[str, str], others: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = policy()
    before["megatron_cfg"]["env_vars"] = others or None
    use = replace(H100, unused_bytes=unused)
    errors = [out_of_memory(before, Path("nowhere"), 1, use), out_of_memory_while("evaluating", before, use)]
    for text in map(str, errors):
        told = f"8.0 GiB lay unused between tensors. Less may lie there with {said}."
        assert told in text if said else "unused" not in text
    if said.startswith("'"):
        assert policy(said.strip("'"))["megatron_cfg"]["env_vars"] == {VARIABLES[0]: ON}


def test_what_lies_unused_is_asked_for_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the most that the allocator ever had, most of which it frees before it gives up."""
    values = {"memory_allocated": 60, "memory_reserved": 68, "max_memory_allocated": 66, "max_memory_reserved": 79}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 * GIB, 79 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100.name)
    use = DeviceUse(H100.name, 79 * GIB, 66 * GIB, unused_bytes=8 * GIB, others_bytes=10 * GIB)
    assert module.device_use(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == use
    error = RuntimeError("NCCL error in: x.cpp:9\nunhandled cuda error\nLast error:\nCuda failure 2 'out of memory'")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    told = "Cuda failure 2 'out of memory'."
    assert module.device_use(error) == replace(use, refused=told)
    outer = RuntimeError("a step failed")
    outer.__cause__ = error
    assert module.device_use(outer) == replace(use, refused=told)
    long = module.device_use(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY " + 1000 * "x")).refused
    assert long == f"{('CUDA_ERROR_OUT_OF_MEMORY ' + 1000 * 'x')[:300]}."
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79 * GIB, 79 * GIB))
    assert module.device_use(outer).others_bytes == 0


def test_a_library_without_room_beside_torchs_cache_is_named() -> None:
    """It seems as if there were room: the tensors of a step that fails so take far less than the device has."""
    use = replace(H100, peak_bytes=56 * GIB, unused_bytes=20 * GIB, others_bytes=2 * GIB, refused="NCCL: no.")
    told = "It was a library that found no room, while 20.0 GiB lay in torch's cache: NCCL: no."
    for each, text in ((use, told), (replace(use, unused_bytes=0), "found no room: NCCL: no.")):
        for error in (
            out_of_memory(policy(), Path("nowhere"), 1, each),
            out_of_memory_while("evaluating", policy(), each),
        ):
            assert text in str(error)
            assert not re.search("expandable|Others had", str(error))
    told = str(out_of_memory(policy(), Path("nowhere"), 1, replace(H100, others_bytes=30 * GIB)))
    assert "GiB of this NVIDIA H100 80GB HBM3. Others had 30.0 GiB." in told


@pytest.mark.parametrize(("reads_narrow", "told"), [(False, True), (True, False)])
def test_an_optimizers_step_without_room_names_what_gives_it_room(reads_narrow: bool, told: bool) -> None:
    """A 14B model trained at 127 GiB of 139.8 and ran out in the update; it was told of activations."""
    megatron = {
        "distributed_data_parallel_config.grad_reduce_in_fp32": "false",
        "transformer_impl": "transformer_engine",
        "optimizer.use_distributed_optimizer": "true",
        "optimizer.optimizer_cpu_offload": "true",
        "optimizer.optimizer_offload_fraction": "0.62",
        "optimizer.use_precision_aware_optimizer": str(reads_narrow).lower(),
    }
    overrides = [f"policy.megatron_cfg.{key}={value}" for key, value in megatron.items()]
    fused = "policy.megatron_cfg.use_fused_linear_logprobs=true"
    small = ("policy.max_total_sequence_length=1024", "policy.train_micro_batch_size=1", fused)
    given = policy("policy.model_name=Qwen/Qwen2.5-14B", *small, *overrides)
    use = DeviceUse("NVIDIA H200", 150_109_880_320, 135 * GIB)
    error = str(out_of_memory(given, Path("nowhere"), 1, use))
    advice = (
        "Set policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true: gradients are then read as they are."
    )
    assert (advice in error) == told
    assert ("To need a tenth less" in error) != told


def test_an_unknown_device_or_model_gets_what_holds_for_all() -> None:
    error = str(out_of_memory(policy(), Path("nowhere"), 1, DeviceUse("Abacus", 8 * GIB, 8 * GIB)))
    assert "Offload more modules, or use smaller microbatches (the device Abacus is not" in error
    error = str(out_of_memory(policy("policy.model_name=mine"), Path("nowhere"), 1, H100))
    assert "use smaller microbatches ('mine' is neither" in error


DIVIDE = "tensor_model_parallel_size or pipeline_model_parallel_size in policy.megatron_cfg divide it among more GPUs"
PACKS = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.logprob_mb_tokens=16384")
FUSED = "policy.megatron_cfg.use_fused_linear_logprobs=true"
ONE = ("policy.logprob_batch_size=1", FUSED)


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
            "a lower policy.train_micro_batch_size (it is 8); policy.megatron_cfg.use_fused_linear_logprobs=true, for "
            "no logits at all",
        ),
        ("generating", PACKS, "a lower policy.generation_batch_size (it is 128)"),
        (
            "computing log-probabilities",
            (*PACKS, FUSED),
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


ALLOCATION_ERRORS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 MiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusparse error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
    "version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async "
    "24 bytes",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA malloc 4194304 bytes",
    "Triton Error [CUDA]: out of memory",
    "/TransformerEngine/common/util/cuda_runtime.cpp:40 in function f: CUDA Error: out of memory",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
)
OTHER_ERRORS = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal memory access'",
    "ncclSystemError: System call failed\nLast error:\nFailed to CUDA host alloc 4096 bytes",
    "ncclSystemError: System call failed\nError while creating shared memory segment: No space left on device",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000)",
    "out of resource: shared memory, Required: 264192, Hardware limit: 232448. Reducing block sizes may help.",
    "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes. Buy new RAM! out of memory",
    "unable to mmap 4096 bytes from file </dev/shm/x>: Cannot allocate memory (12)",
    "shape '[2, 3]' is invalid for input of size 5",
)


@pytest.mark.parametrize("text", ALLOCATION_ERRORS)
def test_each_library_says_in_its_own_words_that_there_is_no_device_memory(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.distributed.DistBackendError(text))
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError(text)
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("text", OTHER_ERRORS)
def test_other_errors_of_the_same_libraries_are_not_taken_for_it(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_only_what_libraries_raise_counts() -> None:
    assert not is_out_of_memory(ValueError("the story is out of memory"))
    assert not is_out_of_memory(ResourceError("out of memory: explained already"))


def test_a_device_without_room_for_this_process_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    with pytest.raises(ResourceError) as caught, explained("loading the model", policy()):
        fail()
    assert str(caught.value).startswith(
        "out of device memory while loading the model: the device has no room for this process at all. See with"
    )


@pytest.fixture(params=[torch.OutOfMemoryError(ALLOCATION_ERRORS[0]), RuntimeError(ALLOCATION_ERRORS[8])])
def error(request: pytest.FixtureRequest) -> RuntimeError:
    """That of torch's own allocator, and one of NCCL's."""
    found: RuntimeError = request.param
    return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> PolicyWorker:
    """One on a full H100, where everything that needs memory fails."""

    peak = [0]

    def fail(*_: Any, **__: Any) -> None:
        peak[0] = H100.peak_bytes
        raise error

    def forget() -> None:
        peak[0] = 0

    for name in ("train_step", "evaluate"):
        monkeypatch.setattr(train_step_module, name, fail)
    for name in ("compute_logprobs", "compute_topk_logits"):
        monkeypatch.setattr(log_probabilities_module, name, fail)
    monkeypatch.setattr(generation_module, "generating", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, H100.total_bytes))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100.name)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    found = PolicyWorker.__new__(PolicyWorker)
    found._policy, found._model_path = policy(), Path("nowhere")
    found._phases = PhasePeaks(Counter(lambda: 0, torch.cuda.max_memory_allocated, forget, lambda: 0))
    found._departed = None
    found._model = types.SimpleNamespace(
        gather_weights=lambda: None, modules=[], config=types.SimpleNamespace(vocab_size=8), optimizer=None
    )  # type: ignore[assignment]
    found._export = types.SimpleNamespace(next_bucket=fail)  # type: ignore[assignment]
    found._loader = types.SimpleNamespace(load=fail)  # type: ignore[assignment]
    found._save = types.SimpleNamespace(finish=fail)  # type: ignore[assignment]
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("method", "arguments", "doing"),
    [
        ("train", (None, "nll", {}, None), "in a training step"),
        ("evaluate", (None, "nll", {}, None), "while evaluating"),
        ("get_logprobs", (None,), "while computing log-probabilities"),
        ("get_topk_logits", (None, 4, 8), "while computing log-probabilities"),
        ("generate", ([], 1, 0, None), "while generating"),
        ("next_weight_bucket", (), "while handing over weights"),
        ("load_weight_bucket", (types.SimpleNamespace(get=dict),), "while handing over weights"),
        ("finish_checkpoint", (), "while writing or reading a checkpoint"),
    ],
)
def test_a_worker_explains_what_libraries_raise(
    worker: PolicyWorker, error: RuntimeError, method: str, arguments: tuple[Any, ...], doing: str
) -> None:
    def call() -> None:
        result = getattr(worker, method)(*arguments)
        list(result if isinstance(result, Iterator) else ())

    with pytest.raises(ResourceError, match=rf"out of device memory {doing}: torch held up to 77\.0 GiB") as caught:
        call()
    assert caught.value.__cause__ is error
    told = str(caught.value)
    assert ("It was a library that found no room" in told) == (not isinstance(error, torch.OutOfMemoryError))


@pytest.mark.parametrize("error", [RuntimeError(OTHER_ERRORS[0])], indirect=True)
def test_a_worker_leaves_other_errors_alone(worker: PolicyWorker) -> None:
    for method, arguments in (("train", (None, "nll", {}, None)), ("get_logprobs", (None,)), ("finish_checkpoint", ())):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            getattr(worker, method)(*arguments)
