"""Rules and warnings about the tokenizer and its chat template, from files as public models have them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Warnings = Callable[..., list[str]]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]").replace(
    "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif"
)
OPEN = CHATML.replace(" + '<|im_end|>\n'", "")
IDS = {"<|endoftext|>": 10, "<|im_start|>": 11, "<|im_end|>": 12}
SFT = ("algorithm=sft", "checkpointing.metric_name=val:loss", "checkpointing.higher_is_better=false")
CHAT = "data.prompt_template=null"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., None]:
    """Write a model's folder into `tmp_path`."""

    def write(
        template: str | None = CHATML, eos: str = "<|im_end|>", generation: Any = None, vocab_size: int = 16
    ) -> None:
        shape = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": vocab_size}
        added = [{"id": number, "content": text} for text, number in IDS.items()]
        tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
        config = {"eos_token": eos} | ({} if template is None else {"chat_template": template})
        files: dict[str, Any] = {"config": shape, "tokenizer": tokens, "tokenizer_config": config}
        if generation is not None:
            files["generation_config"] = {"eos_token_id": generation}
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        save_file({}, tmp_path / "model.safetensors")

    return write


@pytest.fixture
def warnings(check: Check, tmp_path: Path) -> Warnings:
    """The warnings about turns, with the chat template in use."""

    def found(*overrides: str) -> list[str]:
        checked = check(f"policy.model_name={tmp_path}", CHAT, *overrides)
        subjects = ("policy.tokenizer.", "grpo.max_rollout_turns: the chat")
        return [warning for warning in checked.warnings if warning.startswith(subjects)]

    return found


@pytest.mark.parametrize(
    ("eos", "generation", "said"),
    [
        ("<|im_end|>", None, None),
        ("<|im_end|>", 12, None),
        ("<|im_end|>", [12, 10], None),
        ("<|endoftext|>", [12, 10], None),
        (
            "<|endoftext|>",
            None,
            "eos_token is <|endoftext|> (10), the chat template closes a turn with <|im_end|> (12)",
        ),
        ("<|endoftext|>", 10, "generation_config.json has [<|endoftext|> (10)], the chat template closes a turn with"),
        ("<|im_end|>", 10, "eos_token is <|im_end|> (12), generation_config.json has [<|endoftext|> (10)]"),
    ],
)
def test_disagreement_about_ends_is_said_once(
    make: Any, warnings: Warnings, check: Check, tmp_path: Path, eos: str, generation: Any, said: str | None
) -> None:
    make(eos=eos, generation=generation)
    found = warnings()
    assert [said in warning for warning in found] == ([True] if said else []), found
    assert all("\n" not in warning and "ends a response" in warning for warning in found)


def test_with_a_prompt_template_the_chat_templates_end_does_not_count(make: Any, warnings: Warnings) -> None:
    make(eos="<|endoftext|>")
    assert warnings("data.prompt_template='{question} '") == []


def test_a_template_that_opens_thinking_is_said_where_answers_are_learned(make: Any, warnings: Warnings) -> None:
    make(THINKING)
    (found,) = warnings(*SFT)
    assert r"generation prompt is '<|im_start|>assistant\n<think>\n', and it renders answers behind" in found
    assert warnings() == []


def test_a_template_without_an_end_or_a_generation_prompt_is_said(make: Any, warnings: Warnings) -> None:
    make(OPEN)
    (found,) = warnings(*SFT)
    assert found.startswith("policy.tokenizer.chat_template: the chat template writes no token behind an assistant's")
    assert warnings(*SFT, "data.add_eos=true") == warnings() == []
    make(CHATML.replace("<|im_end|>", "<|over|>"))
    for overrides in ((), SFT, (*SFT, "data.add_eos=true")):
        (found,) = warnings(*overrides)
        assert "closes a turn with '<|over|>', which is no token of the tokenizer's, so no response ends there" in found
    make(CHATML.partition("{% if add")[0])
    for overrides in ((), SFT):
        (found,) = warnings(*overrides)
        assert r"has no generation prompt: it opens an assistant's turn with '<|im_start|>assistant\n'" in found


def test_a_template_that_always_prompts_is_refused_where_answers_are_learned(
    make: Any, check: Check, tmp_path: Path
) -> None:
    before, _, _ = CHATML.partition("{% if add")
    make(before + "<|im_start|>assistant{{ '\\n' }}")
    model = f"policy.model_name={tmp_path}"
    with pytest.raises(ConfigError, match=r"begins an assistant's turn behind every conversation, .* learned behind"):
        check(model, CHAT, *SFT)
    check(model, CHAT)


def test_thinking_that_a_rollout_keeps_is_said(make: Any, warnings: Warnings) -> None:
    turns = (
        "grpo.max_rollout_turns=2",
        "data.env_name=function",
        "env.function.path=os.path:join",
        "data.train.path=.",
    )
    off = ("data.validation.path=.",)
    make(THINKING)
    assert any("leaves the thinking of earlier turns out" in warning for warning in warnings(*turns, *off))
    assert not any("leaves the thinking" in warning for warning in warnings())
    make(CHATML)
    assert not any("leaves the thinking" in warning for warning in warnings(*turns, *off))


def test_arguments_of_the_template(make: Any, warnings: Warnings, check: Check, tmp_path: Path) -> None:
    make("{% if enable_thinking %}{% endif %}{{ bos_token }}" + CHATML)
    key = "policy.tokenizer.chat_template_kwargs"
    assert warnings(f"{key}={{enable_thinking: false}}") == []
    (found,) = warnings(f"{key}={{enable_thinkin: false}}")
    assert found.startswith(
        f"{key}.enable_thinkin: has no effect: the chat template does not read it. Did you mean 'enable_thinking'?"
    )
    with pytest.raises(ConfigError, match=rf"{key}\.tokenize: is given by this project"):
        check(f"policy.model_name={tmp_path}", CHAT, f"{key}={{tokenize: true}}")
    checked = check(
        f"policy.model_name={tmp_path}", "data.prompt_template='{question}'", f"{key}={{enable_thinking: false}}"
    )
    assert any(w.startswith(key) and "has no effect while data.prompt_template" in w for w in checked.warnings)


def test_the_template_of_the_setting_counts(make: Any, warnings: Warnings, check: Check, tmp_path: Path) -> None:
    make(eos="<|endoftext|>")
    key = "policy.tokenizer.chat_template"
    closing = CHATML.replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "mine.jinja").write_text(closing)
    assert len(warnings()) == 1
    assert warnings(f"{key}={tmp_path / 'mine.jinja'}") == []
    with pytest.raises(ConfigError, match=rf"{key}: 'mine\.jinja' is no Jinja text"):
        check(f"policy.model_name={tmp_path}", CHAT, f"{key}=mine.jinja")
    elsewhere = check(f"policy.model_name={tmp_path}", CHAT, f"{key}=mine.jinja", run_here=False)
    assert any(w.startswith(f"{key}: 'mine.jinja'") and "Only a run needs it." in w for w in elsewhere.warnings)
    with pytest.raises(ConfigError, match=rf"{key}: is no Jinja template"):
        check(f"policy.model_name={tmp_path}", CHAT, f"{key}='{{% if %}}'")


def test_a_tokenizer_without_a_chat_template_needs_a_prompt_template(make: Any, check: Check, tmp_path: Path) -> None:
    make(None)
    with pytest.raises(
        ConfigError, match=r"data\.prompt_template: null takes the tokenizer's chat template, and it has"
    ):
        check(f"policy.model_name={tmp_path}", CHAT)
    check(f"policy.model_name={tmp_path}", "data.prompt_template='{question}'")
    check(f"policy.model_name={tmp_path}", CHAT, "policy.tokenizer.chat_template=null")


@pytest.mark.parametrize(("vocab_size", "fits"), [(12, False), (13, True), (64, True)])
def test_the_model_has_all_tokens_of_the_tokenizer(
    make: Any, check: Check, tmp_path: Path, vocab_size: int, fits: bool
) -> None:
    make(vocab_size=vocab_size)
    for run_here in (True, False):
        if fits:
            check(f"policy.model_name={tmp_path}", run_here=run_here)
            continue
        with pytest.raises(
            ConfigError, match=r"policy\.tokenizer\.name: .* ids up to 12, .* has 12 tokens .* Take the"
        ):
            check(f"policy.model_name={tmp_path}", run_here=run_here)


def test_generation_config_names_tokens_of_the_model(make: Any, check: Check, tmp_path: Path) -> None:
    make(generation=[12, 16])
    with pytest.raises(
        ConfigError, match=r"eos_token_id of .*generation_config\.json names 16, and the model has 16 tok"
    ):
        check(f"policy.model_name={tmp_path}")
    make(generation="<|im_end|>")
    with pytest.raises(ConfigError, match=r"eos_token_id is '<\|im_end\|>', neither an id nor a list"):
        check(f"policy.model_name={tmp_path}")


def test_a_broken_tokenizer_file_is_a_problem(make: Any, check: Check, tmp_path: Path) -> None:
    make()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: the tokenizer's files in .* cannot be read"):
        check(f"policy.model_name={tmp_path}")


def test_the_teacher_has_all_tokens_of_the_tokenizer(make: Any, check: Check, tmp_path: Path) -> None:
    make()
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    save_file({}, teacher / "model.safetensors")
    (teacher / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 12})
    )
    overrides = ("algorithm=distillation", "distillation.num_prompts_per_step=128", f"teacher.model_name={teacher}")
    with pytest.raises(
        ConfigError, match=r"ids up to 12, and the model .*teacher of teacher\.model_name has 12 tokens"
    ):
        check(f"policy.model_name={tmp_path}", *overrides)
    check(f"policy.model_name={tmp_path}", f"teacher.model_name={teacher}")


@pytest.mark.parametrize("run_here", [True, False])
def test_the_teacher_has_the_students_vocabulary(make: Any, check: Check, tmp_path: Path, run_here: bool) -> None:
    make()
    teacher = tmp_path / "teacher"
    shutil.copytree(tmp_path, teacher)
    distillation = ("algorithm=distillation", "distillation.num_prompts_per_step=128", f"teacher.model_name={teacher}")
    check(f"policy.model_name={tmp_path}", *distillation, run_here=run_here)
    content = json.loads((teacher / "tokenizer.json").read_text())
    content["added_tokens"].append({"id": 13, "content": "<think>"})
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError,
        match=r"teacher\.model_name: .* another vocabulary than the student's: '<think>' has the id 13 in it, and is "
        r"no token of that of policy\.tokenizer\.name\. Choose a teacher of the same family\.",
    ):
        check(f"policy.model_name={tmp_path}", *distillation, run_here=run_here)
    check(f"policy.model_name={tmp_path}", f"teacher.model_name={teacher}", run_here=run_here)
    (teacher / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"teacher\.model_name: the tokenizer's files in .*teacher' cannot be read"):
        check(f"policy.model_name={tmp_path}", *distillation, run_here=run_here)


def test_the_key_of_a_multimodal_models_vocabulary_is_named(make: Any, check: Check, tmp_path: Path) -> None:
    make()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"vocab_size": 12}}))
    with pytest.raises(ConfigError, match=r"has 12 tokens \(text_config\.vocab_size of its config\.json\)"):
        check(f"policy.model_name={tmp_path}")
    with pytest.raises(ConfigError, match=r"which has 12 \(text_config\.vocab_size of its config\.json\)"):
        check(f"policy.model_name={tmp_path}", "policy.generation.stop_token_ids=[12]")
