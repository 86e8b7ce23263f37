"""What `check` says about drafts in generation by vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules.speculative import SPECULATIVE
from nemo_rl_offload.config.validation import examine

TINY = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
GENERATION = "policy.generation"
KWARGS = f"{GENERATION}.vllm_kwargs"
MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
BY_MODEL = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
BY_LAYER = {"method": "deepseek_mtp", "num_speculative_tokens": 1}


@pytest.fixture
def said(tmp_path: Path) -> Any:
    """Problems by path, of a file with this section."""

    def check(section: Any, *overrides: str, backend: str = "vllm", run_here: bool = False) -> dict[str, str]:
        file = tmp_path / "config.yaml"
        generation = {"backend": backend, "vllm_kwargs": {"speculative_config": section}}
        file.write_text(json.dumps({"defaults": str(TINY), "policy": {"generation": generation}}))
        found = examine(load_config(file, overrides), run_here=run_here)
        return {
            path: "\n".join(problem.message for problem in found.problems if problem.path == path)
            for path in {problem.path for problem in found.problems}
        }

    return check


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """An override: the policy is a DeepSeek-V3 with this many layers for further tokens."""

    def write(num_mtp_layers: int, **changes: Any) -> str:
        content = {
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": num_mtp_layers,
            **dict.fromkeys(("num_hidden_layers", "n_group", "topk_group", "first_k_dense_replace"), 1),
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_routed_experts"), 2),
            **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank"), 32),
            **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
            "q_lora_rank": None,
            "num_experts_per_tok": 1,
            "vocab_size": 128,
            "rms_norm_eps": 1e-6,
        }
        (tmp_path / "config.json").write_text(json.dumps(content | changes))
        return f"policy.model_name={tmp_path}"

    return write


def test_a_model_drafts(said: Any) -> None:
    assert said(BY_MODEL) == {}
    assert (
        said(BY_MODEL | {"draft_tensor_parallel_size": 1})
        == said(BY_MODEL | {"draft_tensor_parallel_size": None})
        == {}
    )
    assert said(BY_MODEL, f"{GENERATION}.top_k=5", f"{GENERATION}.val_top_p=0.9") == {}


def test_the_models_own_layer_drafts(said: Any, model: Any) -> None:
    assert not {path for path in said(BY_LAYER, model(1)) if path.startswith(SPECULATIVE)}
    untrained = "policy.megatron_cfg.mtp_num_layers=0"
    assert not {path for path in said(BY_LAYER, model(1), untrained) if path.startswith(SPECULATIVE)}


@pytest.mark.parametrize("pattern", ["*E", "*-"])
def test_a_hybrid_models_layer_drafts(pattern: str, said: Any, model: Any) -> None:
    changes = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "mtp_hybrid_override_pattern": pattern}
    found = said({"method": "mtp", "num_speculative_tokens": 5}, model(1, **changes))
    if pattern == "*E":
        assert not {path for path in found if path.startswith(SPECULATIVE)}
    else:
        assert "this model has *-, which vLLM does not take" in found[f"{SPECULATIVE}.method"]


@pytest.mark.parametrize("num_layers", [0, 2])
def test_a_model_without_one_such_layer_is_refused(num_layers: int, said: Any, model: Any) -> None:
    found = said(BY_LAYER, model(num_layers))
    assert f"this has {num_layers}. Set draft_model, and the folder" in found[f"{SPECULATIVE}.method"]


def test_a_model_beside_a_layer_that_drafts_has_no_effect(said: Any, model: Any) -> None:
    section = BY_LAYER | {"model": "x"}
    assert "has no effect with method deepseek_mtp" in said(section, model(1))[f"{SPECULATIVE}.model"]
    assert f"{SPECULATIVE}.model" not in said(section, model(0)), "it is what the other advice needs"


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("mtp", "", "Allowed: a section with method, model"),
        (
            BY_MODEL | {"method": "eagle3"},
            ".method",
            '"eagle3" asks for drafts by another method, not supported here: nobody has tried it. Allowed: draft',
        ),
        (
            BY_LAYER | {"method": "ngram"},
            ".method",
            "Allowed: draft_model, with the folder of a small model as model; mtp",
        ),
        (BY_MODEL | {"method": "draft_modl"}, ".method", "Did you mean 'draft_model'?"),
        ({"num_speculative_tokens": 2}, ".method", "missing value. Allowed: draft_model"),
        (BY_MODEL | {"rejection_sample_method": "synthetic"}, ".rejection_sample_method", "not supported here"),
        (BY_MODEL | {"num_speculative_token": 3}, ".num_speculative_token", "Did you mean 'num_speculative_tokens'?"),
        (BY_MODEL | {"num_speculative_tokens": 0}, ".num_speculative_tokens", "a whole number from 1 to 32"),
        ({"method": "draft_model", "model": str(MODEL)}, ".num_speculative_tokens", "missing value. Allowed: a"),
        (BY_MODEL | {"draft_tensor_parallel_size": "1"}, ".draft_tensor_parallel_size", '"1" is not policy.gen'),
        (BY_MODEL | {"draft_tensor_parallel_size": 2}, ".draft_tensor_parallel_size", "tensor_parallel_size, 1, and"),
        (BY_MODEL | {"model": None}, ".model", "missing value. Allowed: text, the folder"),
        (BY_MODEL | {"model": 3}, ".model", "3 is not allowed. Allowed: text, the folder"),
        (BY_LAYER, ".method", "follow updates in deepseek_v3, nemotron_h alone. Set draft_model, and the folder of"),
    ],
)
def test_what_a_section_may_not_say(section: Any, key: str, words: str, said: Any) -> None:
    assert words in said(section)[SPECULATIVE + key]


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path, said: Any) -> None:
    content = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": content["vocab_size"] + 1}))
    found = said(BY_MODEL | {"model": str(tmp_path)})
    assert "with the policy's tokenizer and vocabulary" in found[f"{SPECULATIVE}.model"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{GENERATION}.stop_strings=[x]", "would stay in a response"),
        (f"{GENERATION}.vllm_cfg.pipeline_parallel_size=2", "nobody has tried it"),
        (f"+{KWARGS}.async_scheduling=true", "Remove it"),
        ("policy.router_replay.enabled=true", "experts of rejected"),
        ("policy.hf_config_overrides={rope_theta:5000.0}", "Remove one of the two"),
    ],
)
def test_what_is_excluded(override: str, words: str, said: Any) -> None:
    path = override.lstrip("+").partition("=")[0]
    assert words in said(BY_MODEL, override)[path]
    assert "excluded" not in said(None, override).get(path, "")


def test_a_draft_model_that_is_not_there_is_told(said: Any) -> None:
    found = said(BY_MODEL | {"model": "no/such/model"}, run_here=True)
    assert "no/such/model" in found[f"{SPECULATIVE}.model"]


def test_where_vllm_does_not_generate_nothing_is_said_of_drafts(said: Any) -> None:
    found = said({"method": "eagle3"}, backend="megatron")
    assert f"{SPECULATIVE}.method" in found, "a section is checked wherever it stands"
    assert said(BY_MODEL, f"{GENERATION}.stop_strings=[x]", backend="megatron") == {}
