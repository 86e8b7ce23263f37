"""Rewards for programs that a response holds: whether a record's tests pass (`code_processes.py`)."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from nemo_rl_offload.environments.code_processes import Limits, passes, prints
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.thinking import without_thinking
from nemo_rl_offload.errors import ConfigError, WorkerError
from nemo_rl_offload.units import parse_bytes

if TYPE_CHECKING:
    from nemo_rl_offload.config.schema import CodeTestsConfig

_LEAST = f"held = bytearray({1 << 24}); print(input())"
"""What has to work before a run begins."""
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


class CodeTestsEnvironment:
    """Runs the last block of Python in a response; the arguments are those of `prepare`."""

    def __init__(
        self,
        *,
        test_timeout_s: float,
        program_memory: str,
        sandbox: str,
        binary_reward: bool,
        thinking_tags: Sequence[str] | None,
    ) -> None:
        self._limits = Limits(test_timeout_s, parse_bytes(program_memory), is_isolated=sandbox == "required")
        self._binary_reward = binary_reward
        self._thinking_tags = thinking_tags
        self._sound: set[tuple[str, ...]] = set()
        """Tests that an empty program has failed."""
        try:
            works = prints(_LEAST, "1", "1", self._limits._replace(timeout_s=60.0))
        except WorkerError as error:
            raise ConfigError(str(error)) from error
        if not works:
            raise ConfigError(
                f"env.code_tests.memory_limit: Python itself does not run within {program_memory}. Raise it."
            )

    @staticmethod
    def prepare(section: "CodeTestsConfig") -> dict[str, Any]:
        """Give limits of time and memory to the programs; what waits for them needs none."""
        return {
            **section,
            "timeout_s": None,
            "memory_limit": None,
            "test_timeout_s": section["timeout_s"],
            "program_memory": section["memory_limit"],
        }

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        """Test each program; every episode has one turn."""
        return [self._score(episode.entry["tests"], episode.messages[-1]["content"]) for episode in episodes]

    def _score(self, tests: object, response: str) -> Score:
        if self._thinking_tags is not None:
            response = without_thinking(response, *self._thinking_tags)
        program = last_program(response)
        if program is None:
            return Score(0.0, is_correct=False, scorer_error=False)
        known = cast("Sequence[Mapping[str, str]]", tests)
        num_passed = 0
        for test in known:
            has_passed = self._passes(program, test)
            num_passed += has_passed
            if not has_passed and self._binary_reward:
                break
        is_right = num_passed == len(known)
        reward = float(is_right) if self._binary_reward else num_passed / len(known)
        return Score(reward, is_right, scorer_error=False)

    def _passes(self, program: str, test: Mapping[str, str]) -> bool:
        if not self._runs(program, test):
            return False
        if (key := tuple(test.values())) not in self._sound:
            if self._runs("", test):
                raise ValueError(
                    f"this test passes without a program, such as one whose asserts are never run: {key[0][:80]!r}"
                )
            self._sound.add(key)
        return True

    def _runs(self, program: str, test: Mapping[str, str]) -> bool:
        if "code" in test:
            return passes(program, test["code"], self._limits)
        return prints(program, test["input"], test["output"], self._limits)


def last_program(response: str) -> str | None:
    """The content of the last block between fences that begins with ```python; None: there is none."""
    program: str | None = None
    begin: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if begin is None:
            begin = fence
        elif not fence[1].strip():
            if begin[1].lower().split()[:1] in (["python"], ["python3"], ["py"]):
                body = response[begin.end() + 1 : fence.start()]
                program = textwrap.dedent(body) if begin[0][:1].isspace() else body
            begin = None
    return program
