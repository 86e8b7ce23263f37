"""The shipped tiny models: shapes that parallel layouts and inference engines take, a chat template, whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_processes import cpu_environment
from patience import PATIENCE_S
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.reasoning_gym import ReasoningGymProblems
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.data.turns import encode_observation

FOLDERS = [PROJECT_ROOT / "examples/models" / name for name in ("tiny_speller", "tiny_teacher")]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "12"},
]
DIALOG = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n"

each_model = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def nemo_rl_offload(*words: str) -> str:
    """What a command of ours that ends well writes on standard output; on the CPU, one thread for each process."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **cpu_environment(), "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_solved(folder: Path, num_problems: int) -> int:
    """How many words that it was not trained on the model spells backward, by transformers' own greedy decoding."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    params = {"min_word_len": 3, "max_word_len": 5}
    problems = list(ReasoningGymProblems("spell_backward", params, seed=77_000, size=num_problems))
    answers = []
    for problem in problems:
        prompt = torch.tensor([encode_prompt(tokenizer, "{question}\n", problem.question)])
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert (tokens == model.config.eos_token_id).sum() <= 1, "generation goes on after the end token"
        answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))


@each_model
def test_two_ranks_divide_them_and_kernels_for_common_head_sizes_take_them(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    assert config["hidden_size"] / config["num_attention_heads"] == 32
    assert config["vocab_size"] % 8 == 0
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert config[name] % 2 == 0
    assert (folder / "model.safetensors").stat().st_size < 2_000_000
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config["eos_token_id"], config["pad_token_id"])


@each_model
def test_a_turn_of_the_chat_template_ends_as_a_response_does(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.apply_chat_template(TURNS, return_dict=False)
    assert tokenizer.decode(ids) == DIALOG + "12<|im_end|>\n"
    assert ids.count(tokenizer.eos_token_id) == 3
    prompt = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt) == DIALOG
    response = [*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]
    assert ids[: len(prompt) + len(response)] == [*prompt, *response]
    observation = {"role": "user", "content": "Sure?"}
    dialog = tokenizer.apply_chat_template([*TURNS, observation], add_generation_prompt=True, return_dict=False)
    assert [*prompt, *response, *encode_observation(tokenizer, None, [*TURNS, observation], response[-1])] == dialog
    assert DIALOG.endswith("<|im_end|>\n" + tokenizer.decode(encode_prompt(tokenizer, None, " Größe? ")))


@pytest.mark.slow
def test_transformers_generates_with_both_and_the_teacher_is_the_better_one() -> None:
    student, teacher = (num_solved(folder, 40) for folder in FOLDERS)
    assert 4 <= student < teacher
    assert teacher >= 30


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("dimension", ["tensor", "pipeline"])
def test_grpo_on_two_ranks_and_its_export(dimension: str, tmp_path: Path) -> None:
    overrides = (
        "cluster.gpus_per_node=2",
        f"policy.megatron_cfg.{dimension}_model_parallel_size=2",
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=32",
        "checkpointing.save_period=2",
    )
    run_dir, model = tmp_path / "run", tmp_path / "model"
    words = ("run", "grpo", "--format", "json", "--run-dir", str(run_dir), *overrides)
    summary: dict[str, Any] = json.loads(nemo_rl_offload(*words))
    assert (summary["steps"], summary["world_size"], summary["skipped_steps"]) == (2, 2, 0)
    assert summary["offload"]["bytes_out"] == summary["offload"]["bytes_in"] > 0
    assert summary["validation"]["first"] > 0
    nemo_rl_offload("export", str(run_dir / "step_2"), str(model))
    exported, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, FOLDERS[0]))
    assert exported.config.to_dict() | {"_name_or_path": ""} == start.config.to_dict() | {"_name_or_path": ""}
    for name, weight in start.named_parameters():
        moved = (exported.get_parameter(name) - weight).abs().max()
        assert 0 < moved < 0.01, name
    assert AutoTokenizer.from_pretrained(model).chat_template == AutoTokenizer.from_pretrained(FOLDERS[0]).chat_template
