"""Rules about tasks and functions: what breaks each, and that they know what the packages themselves know."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.rules.tasks import GIVEN_TO_ALL, task_params, task_sources
from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
Refuses = Callable[[str, str, str, str], None]
PARAMS = "env.reasoning_gym.params"
NONE = f"~{PARAMS}.min_word_len ~{PARAMS}.max_word_len"

CASES = [
    (
        "env.reasoning_gym.task=spel_backward",
        "env.reasoning_gym.task",
        "Did you mean 'spell_backward'?",
        f"env.reasoning_gym.task=chain_sum {NONE}",
    ),
    (
        "env.reasoning_gym.task=zzzzzz",
        "env.reasoning_gym.task",
        "Some of them: ",
        f"env.reasoning_gym.task=composite {NONE}",
    ),
    (
        f"+{PARAMS}.max_wordlen=6",
        f"{PARAMS}.max_wordlen",
        "not a parameter of task 'spell_backward'. Did you mean 'max_word_len'? It has: min_word_len, max_word_len, ",
        f"~{PARAMS}.max_wordlen",
    ),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


def test_what_is_known_of_tasks_is_what_reasoning_gym_registers() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(task_sources()) == set(DATASETS)
    known = {task: found for task in DATASETS if (found := task_params(task))}
    fields = {task: [field.name for field in dataclasses.fields(DATASETS[task][1])] for task in known}
    assert known == {task: tuple(name for name in names if name not in GIVEN_TO_ALL) for task, names in fields.items()}
    assert len(known) > 0.9 * len(DATASETS)


MODULE = """
import what_is_not_here

def judge(messages, entry, bonus, *, limit=1): ...

@decorator
def wrapped(messages, entry): ...

def anything(messages, entry, **others): ...
"""


@pytest.fixture
def faults(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Problems, by lines, of a function of the module `kit.scores`, or `made`, which defines names as it runs."""
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "scores.py").write_text(MODULE)
    (tmp_path / "kit" / "made.py").write_text("globals().update(judge=print)")
    (tmp_path / "kit" / "kit.py").write_text(MODULE)
    (tmp_path / "maker").mkdir()
    (tmp_path / "maker" / "__init__.py").write_text("__path__.append('elsewhere')")
    (tmp_path / "kit" / "broken.py").write_text("def judge(:")
    (tmp_path / "problems.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def found(path: str, params: str = "{}", *, run_here: bool = True) -> list[str]:
        overrides = [f"env.function.path={path}", f"env.function.params={params}", "data.env_name=function"]
        files = [f"data.{split}.path=problems.jsonl" for split in ("train", "validation")]
        try:
            check(*overrides, *files, run_here=run_here)
        except ConfigError as error:
            return str(error).splitlines()[1:]
        return []

    return found


@pytest.mark.parametrize(
    ("path", "params", "words"),
    [
        ("kit.score:judge", "{bonus: 1}", "path: there is no module 'kit.score'. Did you mean 'scores'?"),
        ("kitt:judge", "{bonus: 1}", "path: there is no module 'kitt'. Did you mean 'kit'?"),
        ("kit.scores.inner:judge", "{bonus: 1}", "path: there is no module 'kit.scores.inner'."),
        ("kit.kit.kit:judge", "{}", "path: there is no module 'kit.kit.kit'."),
        ("kit.scores:juge", "{}", "has no function 'juge'. Did you mean 'judge'?"),
        ("kit.broken:judge", "{}", "broken.py:1: invalid syntax"),
        ("kit.scores:judge", "{bonus: 1, limt: 2}", "params.limt: not a parameter of judge. Did you mean 'limit'?"),
        ("kit.scores:judge", "{bonus: 1, entry: 2}", "params.entry: not a parameter of judge. It takes: bonus, limit."),
        ("kit.scores:judge", "{}", "params.bonus: missing value: judge has no default for it."),
    ],
)
def test_functions(faults: Callable[..., list[str]], path: str, params: str, words: str) -> None:
    (line,) = faults(path, params)
    assert line.startswith("env.function.")
    assert words in line
    assert faults(path, params, run_here=False) == [], "it may be somewhere else"


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("kit.scores:judge", "{bonus: 1}"),
        ("kit.scores:judge", "{bonus: 1, limit: 2}"),
        ("kit.scores:wrapped", "{whatever: 1}"),
        ("kit.scores:anything", "{whatever: 1}"),
        ("kit.made:judge", "{whatever: 1}"),
        ("kit.kit:judge", "{bonus: 1}"),
        ("maker.anything:judge", "{}"),
        ("math:sqrt", "{}"),
        ("os.path:join", "{}"),
        ("reasoning_gym.utils:extract_answer", "{}"),
    ],
)
def test_functions_that_may_be_there(faults: Callable[..., list[str]], path: str, params: str) -> None:
    assert faults(path, params) == []
