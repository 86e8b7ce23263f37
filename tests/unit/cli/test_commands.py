"""`check` and `doctor` on the command line."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.cli import evaluate
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.recipe import read_recipe

EXEMPLARS = sorted(
    set((PROJECT_ROOT / "examples" / "configs").glob("*.yaml")) - {PROJECT_ROOT / "examples/configs/base.yaml"}
)


@pytest.mark.parametrize("exemplar", EXEMPLARS, ids=lambda path: path.stem)
def test_every_exemplar_passes_the_check(exemplar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(exemplar)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"{exemplar}: no problems")
    assert lines[start + 2].split()[0] == "fine_grained_activation_offloading"


def test_check_lists_what_the_optimizer_keeps_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    exemplar, key = str(PROJECT_ROOT / "examples/configs/sft_tiny.yaml"), "optimizer.optimizer_cpu_offload"
    keys = (key, "optimizer.optimizer_offload_fraction", "activation_offload.host_memory_budget")
    for switch, expected in (("true", [True, 1.0, 0.5]), ("false", [None, None, 0.5])):
        assert cli.main(["check", "--format", "json", exemplar, f"policy.megatron_cfg.{key}={switch}"]) == 0
        found = json.loads(capsys.readouterr().out)["offloading"]
        assert [found.get(each) for each in keys] == expected


def test_check_names_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    exemplar = str(PROJECT_ROOT / "examples" / "configs" / "grpo_tiny.yaml")
    code = cli.main(["check", exemplar, "grpo.num_prompts_per_step=0", "policy.precision=float99"])
    error = capsys.readouterr().err
    assert code == cli.EXIT_USER_ERROR
    assert "grpo.num_prompts_per_step" in error
    assert "policy.precision" in error


def test_overrides_that_do_not_apply_have_path_and_place_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    exemplar, words = str(PROJECT_ROOT / "examples" / "configs" / "grpo_tiny.yaml"), ("grpo.sed=1", "~grpo.sex", "word")
    assert cli.main(["check", "--format", "json", exemplar, *words]) == cli.EXIT_USER_ERROR
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [each["path"] for each in problems] == ["grpo.sed", "grpo.sex", ""]
    assert {each["origin"] for each in problems} == {"override on the command line"}


@pytest.mark.parametrize(
    "words",
    [
        ["check", "nowhere.yaml"],
        ["plan", "nowhere.yaml", "--gpu", "h100-80gb"],
        ["plan", str(EXEMPLARS[0]), "--gpu", "h100-80gb", "--layouts", "policy.no_such_key=1"],
        ["run", "grpo", "policy.no_such_key=1"],
        ["eval", "policy.no_such_key=1"],
        ["doctor", "policy.no_such_key=1"],
        ["bench", "offload", "policy.no_such_key=1"],
    ],
    ids=" ".join,
)
def test_a_refusal_is_json_for_machines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--format", "json"]) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    (problem,) = json.loads(captured.out)["problems"]
    assert problem.keys() == {"path", "message", "origin"}
    text = f"{problem['path']} {problem['message']}"
    assert words[1] in text or "no_such_key" in text
    assert problem["message"] in captured.err or words[0] == "check"
    assert cli.main(words) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["run", "grpo"], ["eval"]], ids=" ".join)
def test_a_refusal_has_each_problem_by_its_path(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    exemplar = str(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    wrong = ["policy.precision=float99", "grpo.seed=-1"]
    assert cli.main([*words, "--config", exemplar, "--format", "json", *wrong]) == cli.EXIT_USER_ERROR
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert [each["path"] for each in problems] == ["policy.precision", "grpo.seed"]
    assert {each["origin"] for each in problems} == {"override on the command line"}


def test_a_further_data_set_of_pairs_has_no_column_of_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    exemplar, further = str(PROJECT_ROOT / "examples/configs/dpo_tiny.yaml"), "[{path:README.md,output_key:chosen}]"
    assert cli.main(["check", exemplar, f"data.train.further={further}"]) == cli.EXIT_USER_ERROR
    (_, line) = capsys.readouterr().err.splitlines()
    assert line.startswith("data.train.further.0.output_key: pairs have two answers")
    assert line.endswith("(override on the command line)")


def test_doctor_answers_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--format", "json"])
    found = {finding["name"]: finding["status"] for finding in json.loads(capsys.readouterr().out)}
    assert found["torch"] == "ok"
    assert code == (cli.EXIT_USER_ERROR if "error" in found.values() else 0)


def test_doctor_takes_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "grpo.seed=1"]) == cli.EXIT_USER_ERROR
    assert "grpo.seed=1" in capsys.readouterr().err


def test_the_usage_of_check_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert all(option in usage for option in ("--verbose", "--megatron", "--format"))


def test_an_evaluation_leaves_the_folder_of_a_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples.jsonl").write_text("{}\n")
    assert cli.main(["eval", "--run-dir", str(tmp_path)]) == cli.EXIT_USER_ERROR
    assert "holds a run that trains" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that were evaluated, by a stand-in."""
    from nemo_rl_offload.algorithms import evaluation

    configs: list[Any] = []

    def stand_in(config: object, folder: Path, model: str, *_: object) -> dict[str, object]:
        configs.append(config)
        found = {
            "model": model,
            "num_problems": 1,
            "num_tests_per_prompt": 1,
            "k_value": 1,
            "pass_at_k": 1.0,
            "standard_error": None,
            "accuracy": 1.0,
            "reward": 1.0,
            "mean_gen_tokens_per_sample": 1.0,
            "unfinished_fraction": 0.0,
            "scorer_errors": 0,
            "wall_seconds": 1.0,
        }
        (folder / "evaluation.json").write_text(json.dumps(found))
        return found

    monkeypatch.setattr(evaluation, "run_evaluation", stand_in)
    monkeypatch.setattr(evaluate, "_exported", lambda *_: nullcontext(Path("exported")))
    return configs


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_a_checkpoint_of_any_algorithm_is_evaluated(
    algorithm: str, tmp_path: Path, evaluated: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/checkpoints/step_2").mkdir(parents=True)
    values = read_recipe(PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml").values
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(values))
    words = ["eval", "--checkpoint", str(tmp_path / "run/step_2"), "--run-dir", str(tmp_path / "out")]
    if given := values["data"]["train"]["path"]:
        assert cli.main(words) == cli.EXIT_USER_ERROR
        (error,) = capsys.readouterr().err.splitlines()
        assert "given answers, which nothing can score. Give problems as data.validation.path=FILE, and" in error
        words += ["data.env_name=math", f"data.validation.path={given}"]
    assert cli.main(words) == 0
    assert "warning" not in capsys.readouterr().out, "of keys that nobody wrote"
    assert evaluated[0]["algorithm"] == "grpo"
    assert evaluated[0]["data"]["train"]["path"] == evaluated[0]["data"]["validation"]["path"]


def test_without_a_problem_nothing_is_exported(
    tmp_path: Path, evaluated: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    problems, config = tmp_path / "problems.jsonl", str(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    problems.write_text("")
    unmeasured = [f"grpo.val_{when}" for when in ("period=0", "at_start=false", "at_end=false")]
    words = ["eval", "--config", config, "--run-dir", str(tmp_path / "out"), *unmeasured]
    words.append("checkpointing.metric_name=null")
    of_training = ["data.env_name=math", f"data.train.path={problems}"]
    assert cli.main([*words, *of_training]) == cli.EXIT_USER_ERROR
    assert "data.validation.path: there is no problem to evaluate." in capsys.readouterr().err
    assert not evaluated
    for number, given in enumerate((f"data.validation.path={problems}", "data.train.split_validation_size=0.5")):
        assert cli.main([*words, *of_training, given, "--run-dir", str(tmp_path / f"out{number}")]) == 0
    assert len(evaluated) == 2


def test_an_evaluation_does_not_take_the_place_of_another_models(
    tmp_path: Path, evaluated: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--run-dir", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert cli.main(words) == 0, "the same again"
    file = tmp_path / "out" / "evaluation.json"
    file.write_text(file.read_text().replace("tiny_speller", "another"))
    capsys.readouterr()
    assert cli.main(words) == cli.EXIT_USER_ERROR
    assert "has the evaluation of examples/models/another. Name another --run-dir." in capsys.readouterr().err
