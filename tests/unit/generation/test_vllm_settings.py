"""What is said to a vLLM engine, without vLLM."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules.vllm import OF_OTHER_KEYS, SET_HERE
from nemo_rl_offload.config.schema import VllmConfig
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.errors import ResourceError, WorkerError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.routes import RoutesOfModel
from nemo_rl_offload.generation.vllm.settings import (
    Request,
    divide,
    engine_arguments,
    engine_env,
    is_truncated,
    request_seed,
    sampling_arguments,
)
from nemo_rl_offload.generation.vllm.worker import VllmWorker

GENERATION = "policy.generation"


def policy(*overrides: str) -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]


def arguments(*overrides: str, is_cpu: bool = True) -> dict[str, Any]:
    model = PROJECT_ROOT / "examples/models/tiny_speller"
    return engine_arguments(policy(*overrides), model, is_cpu=is_cpu, can_sleep=True, cache_bytes=1 << 20)


def test_engines_are_told_of_other_positions(tmp_path: Path) -> None:
    """In transformers' newer form whatever the file's is: vLLM puts them over what it has read."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for content in ({"rope_theta": 9.0, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 9.0}}):
        content["model_type"] = "qwen2"
        (tmp_path / "config.json").write_text(json.dumps({**content, "max_position_embeddings": 64}))
        section = policy() | {"hf_config_overrides": {"rope_scaling": yarn}}
        said = engine_arguments(section, tmp_path, is_cpu=True, can_sleep=True, cache_bytes=1 << 20)
        assert said["hf_overrides"] == {"rope_parameters": {**yarn, "rope_theta": 9.0}, "max_position_embeddings": 64}
    assert "hf_overrides" not in arguments()


def test_engines_are_told_how_deepseek_chooses_experts(tmp_path: Path) -> None:
    """What transformers does by itself, vLLM does where the file says so, which those of transformers do not."""
    section = policy() | {"hf_config_overrides": {"max_position_embeddings": 64}}
    for model_type, key, value in (("deepseek_v3", "scoring_func", "sigmoid"), ("deepseek_v2", "n_group", 1)):
        content = {"model_type": model_type, "n_group": 8, "rope_theta": 9.0}
        (tmp_path / "config.json").write_text(json.dumps(content))
        said = engine_arguments(section, tmp_path, is_cpu=True, can_sleep=True, cache_bytes=1 << 20)["hf_overrides"]
        assert said[key] == value
        assert said["max_position_embeddings"] == 64


def test_engines_return_experts_where_they_are_replayed() -> None:
    assert arguments()["enable_return_routed_experts"] is False
    assert arguments("policy.router_replay.enabled=true")["enable_return_routed_experts"] is True


@pytest.mark.parametrize(("num_experts", "dtype"), [(128, np.int8), (129, np.int16)])
def test_experts_of_layers_that_have_some_in_the_smallest_type(tmp_path: Path, num_experts: int, dtype: type) -> None:
    shape = {"num_experts": num_experts, "num_experts_per_tok": 2, "mlp_only_layers": [1], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **shape}))
    routes = RoutesOfModel.of(policy(f"policy.model_name={tmp_path}"))
    said = np.full((6, 3, 2), num_experts - 1, np.uint8 if num_experts == 128 else np.uint16)
    said[:, 1] = 0
    found = routes.of_response(said, 7)
    assert found is not None
    assert found.dtype == dtype
    assert found.shape == (6, 2, 2)
    assert (found == num_experts - 1).all()
    assert routes.of_response(said, 8) is routes.of_response(said, 6) is routes.of_response(None, 7) is None


@pytest.mark.parametrize(
    ("lengths", "num_engines", "expected"),
    [
        ([5, 5, 5, 5], 2, [(0, 2), (2, 4)]),
        ([9, 1, 1, 1], 2, [(0, 1), (1, 4)]),
        ([1, 1, 1, 9], 2, [(0, 3), (3, 4)]),
        ([4], 3, [(0, 0), (0, 1), (1, 1)]),
        ([], 2, [(0, 0), (0, 0)]),
        ([2, 2, 2, 2, 2, 2, 2], 3, [(0, 2), (2, 5), (5, 7)]),
    ],
)
def test_engines_get_about_as_many_tokens_each(
    lengths: list[int], num_engines: int, expected: list[tuple[int, int]]
) -> None:
    pieces = divide(lengths, num_engines)
    assert [length for piece in pieces for length in lengths[piece]] == lengths
    assert len(pieces) == num_engines
    if lengths != [4]:
        assert [(piece.start, piece.stop) for piece in pieces] == expected


def test_no_two_requests_of_successive_calls_have_the_same_seed() -> None:
    seeds = {request_seed(seed, number) for seed in range(30) for number in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(5, 7) == request_seed(5, 7)


def test_the_distribution_is_that_of_the_call() -> None:
    found = sampling_arguments(Sampling(8, 0.7, 0.9, 5), (7, 9), 50)
    assert {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "max_tokens": 8,
        "stop_token_ids": [7, 9],
    }.items() <= found.items()
    assert found["ignore_eos"], "the end tokens are all given"
    assert sampling_arguments(Sampling(8), (7,), 8)["top_k"] == 0


def test_a_response_ends_where_the_context_does() -> None:
    assert sampling_arguments(Sampling(8), (7,), 3)["max_tokens"] == 3


def test_stop_strings_give_the_engine_a_tokenizer_and_requests_that_have_none_no_text() -> None:
    assert sampling_arguments(Sampling(8, stop_strings=("a", "b")), (7,), 8)["stop"] == ["a", "b"]
    assert [
        sampling_arguments(each, (7,), 8)["detokenize"] for each in (Sampling(8), Sampling(8, stop_strings=("a",)))
    ] == [
        False,
        True,
    ]
    found = arguments(f"{GENERATION}.stop_strings=[a]")
    assert not found["skip_tokenizer_init"]
    assert (Path(found["tokenizer"]) / "tokenizer.json").exists()
    assert "tokenizer" not in arguments()


@pytest.mark.parametrize("key", ["top_k=5", "top_p=0.9", "val_top_k=5", "val_top_p=0.9"])
def test_engines_are_made_for_sampling_that_leaves_tokens_out_in_training_or_validation(key: str) -> None:
    assert is_truncated(policy(f"{GENERATION}.{key}")["generation"])
    assert not is_truncated(policy(f"{GENERATION}.val_temperature=0.5")["generation"])


def test_precision_and_context_follow_the_policy() -> None:
    found = arguments()
    assert (found["dtype"], found["max_model_len"]) == ("float32", 96)
    found = arguments(f"{GENERATION}.vllm_cfg.precision=bfloat16", f"{GENERATION}.vllm_cfg.max_model_len=90")
    assert (found["dtype"], found["max_model_len"]) == ("bfloat16", 90)


def test_each_key_reaches_the_engine() -> None:
    changed = {
        "kv_cache_dtype": "fp8",
        "load_format": "safetensors",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 91,
        "enable_prefix_caching": "false",
        "enforce_eager": "true",
        "skip_tokenizer_init": "false",
        "precision": "bfloat16",
        "expert_parallel_size": 2,
    }
    of_eight_bits = {"use_deep_gemm", "num_first_layers_in_bf16", "num_last_layers_in_bf16"} | {
        *("quantization_ignored_layer_kws", "is_mx"),
    }
    of_chats = {"http_server_serving_chat_kwargs", "tool_parser_plugin", "reasoning_parser_plugin"}
    others = {"async_engine", "env_vars"} | of_eight_bits | of_chats
    assert changed.keys() | others == keys_of(VllmConfig).keys()
    before = arguments(is_cpu=False)
    for key, value in changed.items():
        assert arguments(f"{GENERATION}.vllm_cfg.{key}={value}", is_cpu=False) != before, key


def test_engines_in_eight_bits_quantize_blocks_of_the_weights_that_they_get() -> None:
    """The patterns as vLLM reads them: against the beginning of a linear's path."""
    cfg = f"{GENERATION}.vllm_cfg"
    on = (f"{cfg}.precision=fp8", "policy.precision=bfloat16")
    keys = ("num_first_layers_in_bf16=1", "num_last_layers_in_bf16=1", "quantization_ignored_layer_kws=[a_proj,o.p]")
    found = arguments(*on, *(f"{cfg}.{key}" for key in keys), is_cpu=False)
    assert (found["dtype"], found["quantization"]) == ("bfloat16", "online")
    section = found["quantization_config"]
    assert section["linear"] == section["moe"] == "fp8_per_block"

    def stays(path: str, ignored: list[str] = section["ignore"]) -> bool:
        return any(re.match(pattern.removeprefix("re:"), path) for pattern in ignored)

    num_layers = json.loads((PROJECT_ROOT / "examples/models/tiny_speller/config.json").read_text())[
        "num_hidden_layers"
    ]
    whole = {
        f"model.layers.{layer}.mlp.down_proj" for layer in range(20) if stays(f"model.layers.{layer}.mlp.down_proj")
    }
    assert whole == {f"model.layers.{layer}.mlp.down_proj" for layer in (0, num_layers - 1)}
    assert stays("model.layers.7.self_attn.fused_qkv_a_proj")
    assert not stays("model.layers.7.self_attn.o_proj")
    plain = arguments(*on, is_cpu=False)["quantization_config"]["ignore"]
    assert stays("model.layers.7.mlp.gate", plain)
    assert not stays("model.layers.7.mlp.gate_up_proj", plain)
    assert not stays("model.layers.0.mlp.down_proj", plain)
    assert not {"quantization", "quantization_config"} & set(arguments(is_cpu=False))


def test_deep_gemm_is_for_engines_in_eight_bits() -> None:
    cfg, names = f"{GENERATION}.vllm_cfg", ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0")
    for precision, key, expected in (
        ("fp8", "true", ["1", "0"]),
        ("fp8", "false", ["0", None]),
        ("null", "true", ["0", None]),
    ):
        env = engine_env(policy(f"{cfg}.precision={precision}", f"{cfg}.use_deep_gemm={key}")["generation"], "cuda")
        assert [env.get(name) for name in names] == expected


def test_further_arguments_come_last_and_none_that_a_key_says() -> None:
    found = arguments(f"+{GENERATION}.vllm_kwargs.max_num_seqs=3", is_cpu=False)
    assert found["max_num_seqs"] == 3
    assert set(OF_OTHER_KEYS) | set(SET_HERE) >= set(arguments()) - {
        *("enable_chunked_prefill", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"),
    }


def test_on_a_cpu_prompts_are_read_whole_and_nothing_is_compiled() -> None:
    found = arguments()
    assert not found["enable_chunked_prefill"]
    assert found["max_num_batched_tokens"] >= found["max_model_len"]
    assert found["enforce_eager"]
    assert found["kv_cache_memory_bytes"] == 1 << 20
    assert engine_env(policy()["generation"], "cpu")["TORCHDYNAMO_DISABLE"] == "1"
    assert "enable_sleep_mode" not in found


def test_on_a_gpu_an_engine_can_sleep_and_has_graphs_unless_eager() -> None:
    found = arguments(is_cpu=False)
    assert found["enable_sleep_mode"]
    assert "compilation_config" in found
    assert "compilation_config" not in arguments(f"{GENERATION}.vllm_cfg.enforce_eager=true", is_cpu=False)


def test_truncated_sampling_has_the_runner_that_returns_whole_log_probabilities() -> None:
    key = "VLLM_USE_V2_MODEL_RUNNER"
    assert key not in engine_env(policy()["generation"], "cuda")
    for override in ("top_k=5", "top_p=0.9"):
        assert engine_env(policy(f"{GENERATION}.{override}")["generation"], "cuda")[key] == "0"


def drafting(**section: object) -> Any:
    config = policy()
    config["generation"]["vllm_kwargs"] = {"speculative_config": {"num_speculative_tokens": 2, **section}}
    return config


def test_engines_that_check_drafts_know_what_drafts_and_of_which_weights_a_token_is(tmp_path: Path) -> None:
    config = drafting(method="draft_model", model="examples/models/tiny_speller")
    folder = PROJECT_ROOT / "examples/models/tiny_speller"
    said = engine_arguments(config, folder, is_cpu=False, can_sleep=True, cache_bytes=None)
    assert said["speculative_config"]["model"] == str(folder)
    assert said["async_scheduling"] is False
    assert engine_env(config["generation"], "cuda")["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    own = drafting(method="mtp")
    told = engine_arguments(own, tmp_path, is_cpu=False, can_sleep=True, cache_bytes=None)["hf_overrides"]
    assert told(PretrainedConfig()).topk_method == "noaux_tc", "the layer that drafts is told too"
    assert "async_scheduling" not in arguments()


def test_the_users_variables_are_there_too() -> None:
    section = policy(f"{GENERATION}.vllm_cfg.env_vars={{NCCL_DEBUG: INFO}}")["generation"]
    for device in ("cpu", "cuda"):
        assert engine_env(section, device) == {"NCCL_DEBUG": "INFO"} | engine_env(policy()["generation"], device)


class Engine:
    """vLLM's, which has no memory for a step."""

    def add_request(self, name: str, *_: object) -> str:
        return name

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("call", ["generate", "advance"])
def test_an_engine_out_of_memory_in_a_step_says_which_key_is_its_share(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = VllmWorker.__new__(VllmWorker)
    monkeypatch.setattr(VllmWorker, "_wake", lambda *_: None)
    monkeypatch.setattr(VllmWorker, "_params", lambda *_: None)
    worker._llm, worker._under_way, worker._num_updates = SimpleNamespace(llm_engine=Engine()), {}, 0
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: list(worker.generate([[1]], 0, [0], Sampling(8))),
        "advance": lambda: worker.advance([Request(0, [1], 0, 0, Sampling(8))]),
    }
    with pytest.raises(ResourceError, match=r"generating with vLLM: .*2\.00 GiB.*vllm_cfg\.gpu_memory_utilization"):
        calls[call]()


def test_an_engine_without_prompts_wakes_up_whole_and_knows_what_it_lacks_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half asleep, it would not go to sleep again."""
    worker, free, sizes = VllmWorker.__new__(VllmWorker), {"bytes": 10}, {"weights": 3, "kv_cache": 50}

    def sleep(level: int) -> None:
        assert level == 2, "weights and cache are both given up"
        free["bytes"] += sum(sizes.values())

    def wake_up(tags: list[str]) -> None:
        free["bytes"] -= sum(sizes[tag] for tag in tags)

    monkeypatch.setattr(VllmWorker, "_free_bytes", staticmethod(lambda: free["bytes"]))
    worker._asleep, worker._can_sleep, worker._slept_bytes, worker._unused_bytes = set(), True, 0, 7
    worker._speculates = False
    worker._llm = SimpleNamespace(sleep=sleep, wake_up=wake_up)
    assert worker.lacking_bytes() == 0
    for _ in range(2):
        worker.sleep()
        free["bytes"] -= 4  # training has got larger
        assert worker.lacking_bytes() == 60
        worker.wake()
        assert (free["bytes"], worker.lacking_bytes()) == (56, 57)
        assert list(worker.generate([], 0, [], Sampling(8))) == []
        assert (free["bytes"], worker.lacking_bytes()) == (6, 0)
        free["bytes"] = 10
    worker.sleep()
    worker.wake()
    worker.sleep()
    assert worker._asleep == {"weights", "kv_cache"}, "an engine that got no prompts gives its weights up too"
    assert free["bytes"] == 63


def test_what_drafts_survives_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = VllmWorker.__new__(VllmWorker), list[str]()
    monkeypatch.setattr(VllmWorker, "_free_bytes", staticmethod(lambda: 0))
    monkeypatch.setattr(VllmWorker, "_on_the_model", lambda _, method: done.append(method))
    worker._asleep, worker._can_sleep, worker._slept_bytes, worker._speculates = set(), True, 0, True
    worker._llm = SimpleNamespace(
        sleep=lambda level: done.append(f"sleep {level}"), wake_up=lambda tags: done.append(f"wake {tags[0]}")
    )
    worker.sleep()
    worker.wake()
    assert list(worker.generate([], 0, [], Sampling(8))) == []
    assert done == ["keep_drafts", "sleep 2", "wake weights", "give_drafts_back", "wake kv_cache"]


def test_an_engine_of_several_devices_is_started_by_its_workers() -> None:
    assert "distributed_executor_backend" not in arguments()
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        found = arguments(f"{GENERATION}.vllm_cfg.{key}=2")
        assert found["distributed_executor_backend"] == "external_launcher"
        assert found[key] == 2
        env = engine_env(policy(f"{GENERATION}.vllm_cfg.{key}=2")["generation"], "cuda")
        assert env["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in engine_env(policy()["generation"], "cuda")


def test_experts_are_whole_where_they_are_divided_among_devices() -> None:
    assert not arguments(f"{GENERATION}.vllm_cfg.tensor_parallel_size=2")["enable_expert_parallel"]
    both = (f"{GENERATION}.vllm_cfg.{kind}_parallel_size=2" for kind in ("tensor", "expert"))
    assert arguments(*both)["enable_expert_parallel"]


@pytest.mark.parametrize("others", [[5, 6], [5, 7]])
def test_devices_of_an_engine_that_disagree_end_the_run(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = VllmWorker.__new__(VllmWorker)
    worker._num_devices, worker._peers = 2, "both"
    digests: list[str] = []

    def gather(found: list[str], own: str, group: str) -> None:
        assert group == "both"
        found[:] = [*digests, own] if digests else [own, own]
        digests.append(own)

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    worker._rank_of_engine = 0
    own = [Response([5, 6], [-1.0, -1.0], False)]
    assert worker._of_the_engine(own) == own
    worker._rank_of_engine = 1
    if others == [5, 6]:
        assert worker._of_the_engine(own) == []
    else:
        with pytest.raises(WorkerError, match="sampled different responses"):
            worker._of_the_engine([Response(others, [-1.0, -1.0], False)])


def test_one_device_asks_nobody() -> None:
    worker = VllmWorker.__new__(VllmWorker)
    worker._num_devices = 1
    assert worker._of_the_engine(responses := [Response([5], [-1.0], True)]) is responses
