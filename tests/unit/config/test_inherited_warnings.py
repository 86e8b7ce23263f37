"""Warnings of keys without effect: of those that the user has written, in one line; of inherited ones, nothing."""

from pathlib import Path

import pytest

from nemo_rl_offload.cli.check import as_text, check_file
from nemo_rl_offload.config.loader import PROJECT_ROOT

PARENT = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
GRPO_ALONE = (
    "grpo: {num_generations_per_prompt: 4}\nloss_fn: {entropy_coeff: 0.1}\npolicy: {generation_batch_size: 3}\n"
)
SFT = (
    "algorithm: sft\ncheckpointing: {metric_name: val:loss, higher_is_better: false}\n"
    "data: {train: {path: examples/data/chats.jsonl}, validation: {path: examples/data/chats.jsonl}}\n"
)


def warned(path: Path, *overrides: str) -> set[str]:
    """The keys of which it is said that they have no effect."""
    found = check_file(path, overrides)
    assert found.problems == []
    return {warning.path for warning in found.warnings if "no effect" in warning.message}


@pytest.fixture
def inherits(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: {PARENT}\n{SFT}")
    return path


def test_nothing_is_said_of_inherited_keys(inherits: Path) -> None:
    assert warned(inherits) == set()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("grpo.seed=7", "grpo.seed"),
        ("policy.generation_batch_size=3", "policy.generation_batch_size"),
        ("data.max_input_seq_length=70", "data.max_input_seq_length"),
        ("policy.megatron_cfg.optimizer.min_lr=1e-9", "policy.megatron_cfg.optimizer.min_lr"),
        ("env.reasoning_gym.binary_reward=true", "env.reasoning_gym.binary_reward"),  # others of its line are inherited
        ("env.reasoning_gym.params.max_word_len=5", "env.reasoning_gym.params"),
        ("checkpointing.metric_name=train:loss", None),
    ],
)
def test_what_the_command_line_gives_is_the_users(override: str, key: str | None, inherits: Path) -> None:
    assert warned(inherits, override) == ({key} if key else set())


def test_a_line_names_no_inherited_key_beside_the_users(inherits: Path) -> None:
    found = check_file(inherits, ["data.validation.size=7"])
    (line,) = [str(warning) for warning in found.warnings if "no effect" in warning.message]
    assert "nor have" not in line


def test_what_the_file_itself_gives_is_the_users_whatever_it_inherits(inherits: Path, tmp_path: Path) -> None:
    inherits.write_text(f"{inherits.read_text()}{GRPO_ALONE}")
    keys = {"grpo.num_generations_per_prompt", "loss_fn.entropy_coeff", "policy.generation_batch_size"}
    assert warned(inherits) == keys
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text(f"defaults: {inherits}\n")
    assert warned(grandchild) == set()


def test_several_are_one_line(inherits: Path) -> None:
    inherits.write_text(f"{inherits.read_text()}{GRPO_ALONE}")
    found = check_file(inherits, [])
    lines = [line for line in as_text(inherits, found).splitlines() if "effect" in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: 3 keys have no effect: ")
    for key in ("grpo.num_generations_per_prompt", "loss_fn.entropy_coeff", "policy.generation_batch_size"):
        assert key in lines[0]
    verbose = as_text(inherits, found, verbose=True)
    assert verbose.count("has no effect with algorithm sft") == 3


def test_other_warnings_are_also_of_inherited_keys(inherits: Path) -> None:
    """A warm-up that is longer than the run matters, whoever has written it."""
    found = check_file(inherits, ["sft.max_num_steps=2", "sft.max_num_epochs=null"])
    assert any(warning.path.endswith("lr_warmup_iters") for warning in found.warnings)
