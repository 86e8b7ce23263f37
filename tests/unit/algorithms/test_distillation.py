"""The distillation loop over stand-ins for both policies and the scorer."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import END_ID, FakeEnvironment, FakePolicy, Recorder

from nemo_rl_offload.algorithms import distillation
from nemo_rl_offload.algorithms.distillation import Distillation, run_distillation, teacher_config
from nemo_rl_offload.cluster.signals import Termination
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.errors import ConfigError, DataError

SMALL = (
    "algorithm=distillation",
    "teacher.model_name=teacher",
    "distillation.num_prompts_per_step=3",
    "distillation.num_generations_per_prompt=2",
    "distillation.max_num_steps=4",
    "distillation.topk_logits_k=5",
    "distillation.val_period=2",
    "data.train.size=60",
    "data.validation={path: null, split: null, seed: 10000000, size: 6, exclude: []}",
)


@pytest.fixture
def config() -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", SMALL)


def test_students_answers_with_the_teachers_logits(config: Any, tokenizer: Any, tmp_path: Path) -> None:
    policy, teacher, environment = FakePolicy(), FakePolicy(), FakeEnvironment()
    prompts = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, seed=1)
    pool: Any = environment
    loop = Distillation(config, policy, teacher, pool, tokenizer, {END_ID}, prompts, tmp_path)
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    assert [step for step, prefix in recorder.logged if prefix == "validation"] == [0, 2, 4]
    assert loop.validation["last"] == recorder.logged[4, "validation"]["accuracy"]
    assert policy.num_prompts == [6, 6, 6, 6, 6, 6, 6]
    assert policy.losses == [("distillation", config["loss_fn"])] * 4
    assert teacher.num_prompts == []
    assert teacher.batches == []
    for batch in policy.batches:
        shape = batch["input_ids"].shape
        assert torch.equal(batch["teacher_topk_logits"], torch.full((*shape, 5), 264.0))
        assert batch["teacher_topk_indices"].shape == (*shape, 5)
    samples = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert {(each["step"], each["prefix"]) for each in samples} == {(step, "validation") for step in (0, 2, 4)}
    assert recorder.shown
    assert set(recorder.logged[1, "train"]) >= {"loss", "reward", "accuracy", "num_tokens"}
    loop.close()
    assert policy.is_shut_down
    assert teacher.is_shut_down
    assert environment.is_shut_down


def test_no_more_tokens_are_asked_for_than_there_are(config: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A padded vocabulary has more logits, which mean nothing."""
    config["distillation"]["topk_logits_k"] = 1000
    prompts = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, seed=1)
    policy, environment = FakePolicy(), cast("Any", FakeEnvironment())
    Distillation(config, policy, FakePolicy(), environment, tokenizer, {END_ID}, prompts, tmp_path).train_step()
    assert policy.batches[0]["teacher_topk_indices"].shape[-1] == len(tokenizer) < 1000


def test_the_teacher_is_the_student_with_its_own_keys(config: Any) -> None:
    teacher: Any = teacher_config(config)
    assert teacher["model_name"] == "teacher"
    assert teacher["precision"] == config["policy"]["precision"]
    assert teacher["megatron_cfg"]["fine_grained_activation_offloading"] is False
    assert config["policy"]["megatron_cfg"]["fine_grained_activation_offloading"] is True
    config["teacher"] |= {"precision": "bfloat16", "logprob_batch_size": 3}
    teacher = teacher_config(config)
    assert (teacher["precision"], teacher["logprob_batch_size"]) == ("bfloat16", 3)


@pytest.mark.parametrize(("of_student", "of_teacher"), [(None, None), (0, 0), (1, None)])
def test_a_teacher_has_its_own_layers_for_further_tokens_or_none(
    of_student: int | None, of_teacher: int | None, config: Any
) -> None:
    config["policy"]["megatron_cfg"] |= {"mtp_num_layers": of_student, "mtp_use_repeated_layer": True}
    assert teacher_config(config)["megatron_cfg"]["mtp_num_layers"] == of_teacher
    assert not teacher_config(config)["megatron_cfg"]["mtp_use_repeated_layer"]


def test_the_teachers_layers_are_divided_evenly_and_without_virtual_stages(config: Any) -> None:
    student = config["policy"]["megatron_cfg"]
    student |= {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}
    student |= {"overlap_p2p_comm": True, "batch_p2p_comm": False, "num_layers_in_first_pipeline_stage": 3}
    student |= {"pipeline_model_parallel_layout": "Et|tL", "tensor_model_parallel_size": 2}
    teacher: Any = teacher_config(config)["megatron_cfg"]
    changed = {key: value for key, value in teacher.items() if "offload" not in key and value != student[key]}
    assert changed == {
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "overlap_p2p_comm": False,  # which needs virtual stages
        "batch_p2p_comm": True,
    }


def run(monkeypatch: pytest.MonkeyPatch, policies: Any, *overrides: str) -> None:
    """As far as the policies are made, by `policies` in the place of their class."""
    monkeypatch.setattr(distillation, "Policy", policies)
    monkeypatch.setattr(distillation, "make_environment", lambda *_: None)
    monkeypatch.setattr(distillation, "training_and_generation_slots", lambda *_: (None, None))
    monkeypatch.setattr(distillation, "Distillation", lambda *_: None)
    monkeypatch.setattr(distillation, "run_loop", lambda _config, _dir, _say, _stream, build, _groups: build(None))
    made = load_config(PROJECT_ROOT / "examples/configs/distillation_tiny.yaml", overrides)
    run_distillation(made, Path(), lambda _: None, None)


def test_faults_of_the_teachers_folder_name_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ConfigError("policy.model_name: x: its weights have other shapes\npolicy.model_name: x: and more")

    with pytest.raises(ConfigError, match=r"^teacher\.model_name: x: its .*\nteacher\.model_name: x: and more$"):
        run(monkeypatch, refuses)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"^teacher\.model_name: "):
        run(monkeypatch, refuses, f"teacher.model_name={tmp_path}")


def test_a_student_computes_no_log_probabilities_for_which_its_optimizer_could_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def policies(_: object, section: Any, *__: object, **___: object) -> Any:
        made.append(section)
        return FakePolicy()

    monkeypatch.setattr(FakePolicy, "leave_device", lambda _: None, raising=False)
    run(monkeypatch, policies, "policy.offload_optimizer_for_logprob=true")
    assert made[1]["offload_optimizer_for_logprob"] is False
