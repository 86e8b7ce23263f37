import json
from argparse import Namespace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import beside_trl
import grpo_step
import pytest
from attempts import HighestMemory, Ours, line_of
from beside_trl import ATTEMPTS, KL_WEIGHT, VLLM_SHARE, Phases, long_prompt_settings, prompt_texts, settings
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config

OPTIONS = Namespace(
    share=VLLM_SHARE,
    kl_weight=KL_WEIGHT,
    prompts=16,
    responses=256,
    prompt_tokens=0,
    response_tokens=128,
    steps=grpo_step.NUM_STEPS,
)
MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
GPU_EXEMPLAR = PROJECT_ROOT / "examples/configs/grpo_math_1B_vllm.yaml"


@pytest.mark.parametrize(("prompt_tokens", "response_tokens"), [(0, 128), (0, 32_604), (31_680, 1024)])
@pytest.mark.parametrize("name", [name for name, attempt in ATTEMPTS.items() if isinstance(attempt, Ours)])
def test_our_attempts_are_configurations(
    name: str, prompt_tokens: int, response_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_trl, "HAS_GPU", True)
    attempt = ATTEMPTS[name]
    assert isinstance(attempt, Ours)
    lengths = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "steps": 1, "prompts": 1}
    options = Namespace(**{**vars(OPTIONS), **lengths})
    given = [*settings(options), *attempt.overrides, *long_prompt_settings(tmp_path, options)]
    overrides = grpo_step.overrides(MODEL, Namespace(set=given))
    checked = check_config(load_config(GPU_EXEMPLAR, overrides), name, run_here=False)
    assert checked.config["policy"]["megatron_cfg"]["peft"]["enabled"] == ("LoRA" in name)


def test_prompts_are_those_of_our_runs() -> None:
    texts = prompt_texts(MODEL, OPTIONS)
    assert len(texts) == grpo_step.NUM_STEPS * OPTIONS.prompts
    assert all("Spell this word backward" in text for text in texts)


def test_both_sides_have_the_same_long_prompts(tmp_path: Path) -> None:
    options = Namespace(**{**vars(OPTIONS), "prompt_tokens": 300, "steps": 2, "prompts": 3})
    long_prompt_settings(tmp_path, options)
    written = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert written == prompt_texts(MODEL, options)
    assert [len(text) for text in written] == 6 * [300]


def test_phases_are_parts_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(beside_trl, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = SimpleNamespace(generate=lambda: spend(4.0), sync=lambda: spend(1.0))
    trainer.rollout = lambda: (trainer.sync(), trainer.generate(), spend(2.0))
    phases = Phases()
    for method, name in (("rollout", "rollout"), ("generate", "generation"), ("sync", "refit")):
        phases.wrap(trainer, method, name)
    for _ in range(2):
        trainer.rollout()
        phases.end_step(step_s=10.0, num_tokens=500)
    assert phases.steps == 2 * [
        {
            "timing/refit_s": 1.0,
            "timing/generation_s": 4.0,
            "timing/logprobs_s": 2.0,
            "timing/train_s": 3.0,
            "timing/step_s": 10.0,
            "tokens_per_s": 50.0,
        }
    ]


def test_memory_is_the_highest_over_what_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([(5, 100), (30, 110), (7, 300)])
    seen = Event()

    def ask(_: HighestMemory) -> tuple[int, int]:
        if (found := next(used, None)) is None:
            seen.set()
        return found or (6, 101)

    monkeypatch.setattr(HighestMemory, "_used", ask)
    with HighestMemory() as memory:
        assert seen.wait(PATIENCE_S)
    assert memory.bytes() == {"peak_device_bytes": 25, "peak_host_bytes": 200, "device_before_bytes": 5}


def test_a_line_says_the_error_or_the_figures() -> None:
    assert line_of({"name": "TRL float32", "error": "out of memory"}) == "TRL float32: out of memory"
    medians = {"timing/generation_s": 4.0, "timing/step_s": 10.0, "tokens_per_s": 5000.0}
    memory = {"peak_device_bytes": 3 << 30, "peak_host_bytes": 1 << 29}
    line = line_of({"name": "ours", "error": None, "medians": medians, "memory": memory})
    assert line == "ours: generation 4.00, step 10.00 s; 5,000 tokens/s; device 3.0 GiB, host 0.5 GiB"
