"""`check --megatron`: Megatron-Core's own word, with the model's config.json and without."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.megatron.build import config_check

TINY = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
M = "policy.megatron_cfg"
Ask = Callable[..., dict[str, list[dict[str, str]]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(*overrides: str) -> dict[str, list[dict[str, str]]]:
        code = cli.main(["check", "--megatron", "--format", "json", str(TINY), *overrides])
        found: dict[str, list[dict[str, str]]] = json.loads(capsys.readouterr().out)
        assert code == (2 if found["problems"] else 0)
        return found

    return run


def test_megatron_takes_the_tiny_exemplar(ask: Ask) -> None:
    found = ask()
    assert (found["problems"], found["warnings"]) == ([], [])


@pytest.mark.slow
def test_what_other_libraries_say_is_kept_from_the_user_and_a_refusal_is_not() -> None:
    wrong = f"{M}.model_overrides={{overlap_p2p_comm_warmup_flush:true}}"
    words = [sys.executable, "-m", "nemo_rl_offload.cli", "check", "--megatron", str(TINY), wrong]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.stdout == ""
    *warnings, head, problem = process.stderr.splitlines()
    assert all(line.startswith(f"warning: {M}") for line in warnings)
    assert head == f"error: {TINY}: 1 problem"
    assert problem.startswith(f"{M}.overlap_p2p_comm: Megatron-Core refuses this configuration: ")


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        (f"{M}.model_overrides={{defer_embedding_wgrad_compute:true}}", M, "Cannot defer embedding wgrad compute"),
        (f"{M}.model_overrides={{overlap_p2p_comm_warmup_flush:true}}", f"{M}.overlap_p2p_comm", "warmup and flush"),
    ],
)
def test_what_only_megatron_knows(ask: Ask, override: str, path: str, words: str) -> None:
    (problem,) = ask(override)["problems"]
    assert problem["path"] == path
    assert problem["message"].startswith("Megatron-Core refuses this configuration: ")
    assert words in problem["message"]


def test_each_object_is_asked(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in ("RULES", "WARNINGS"):
        monkeypatch.setattr(f"nemo_rl_offload.config.validation.{rules}", ())
    found = ask(f"{M}.scheduler.lr_warmup_init=5.0", f"{M}.recompute_granularity=full")["problems"]
    assert [problem["path"] for problem in found] == [f"{M}.recompute_granularity", f"{M}.scheduler"]
    assert "self.init_lr <= self.max_lr" in found[1]["message"]
    assert found[0]["origin"] == "override on the command line"


def test_without_the_models_config_the_rest_is_asked(ask: Ask, tmp_path: Path) -> None:
    warnings = ask(f"policy.model_name={tmp_path}/none")["warnings"]
    assert sum("Megatron-Core was not asked about the model" in warning["message"] for warning in warnings) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen22"}, "model_type 'qwen22' of config.json is not trained here."),
        ({"model_type": None}, "model_type None of config.json is not trained here."),
        ({"model_type": "bert"}, "model_type 'bert' of config.json is not trained here."),
        ({"vocab_size": "many"}, "vocab_size 'many' of config.json is not taken"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 of config.json is not taken"),
        ({"dtype": "float7"}, "float7"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
            "The size of tensor a (3) must match",
        ),
    ],
)
def test_models_that_cannot_be_taken(ask: Ask, tmp_path: Path, change: dict[str, object], words: str) -> None:
    model = json.loads((PROJECT_ROOT / "examples/models/tiny_speller/config.json").read_text())
    model.pop("architectures")
    (tmp_path / "config.json").write_text(json.dumps(model | change))
    (problem,) = ask(f"policy.model_name={tmp_path}")["problems"]
    assert problem["path"] == "policy.model_name"
    assert words in problem["message"]


def test_what_needs_transformer_engine_is_left_to_the_run(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check, "have_transformer_engine", lambda: False)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"megatron.core.models.common.embeddings.rope_utils.{name}", None)
    found = ask(
        f"{M}.transformer_impl=transformer_engine", f"{M}.offload_modules=[core_attn]", f"{M}.apply_rope_fusion=true"
    )
    assert found["problems"] == []
    assert any("Please install TE" in w["message"] and "Only a run needs it" in w["message"] for w in found["warnings"])


def test_fusions_of_a_model_of_torch_layers_are_not_asked_for(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were said to need Transformer Engine, beside a line that they have no effect."""
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"megatron.core.models.common.embeddings.rope_utils.{name}", None)
    model = json.loads((PROJECT_ROOT / "examples/models/tiny_speller/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"model_type": "llama", "attention_bias": True}))
    warnings = ask(f"policy.model_name={tmp_path}", f"{M}.transformer_impl=auto", f"{M}.apply_rope_fusion=true")[
        "warnings"
    ]
    messages = [warning["message"] for warning in warnings]
    assert not [message for message in messages if "install TE" in message]
    assert [message for message in messages if message.startswith("has no effect: the model's layers are plain torch")]


def test_nothing_is_asked_where_something_is_wrong(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check, "quiet", None)
    (problem,) = ask(f"{M}.offload_modules=[atn]")["problems"]
    assert problem["path"] == f"{M}.offload_modules"
