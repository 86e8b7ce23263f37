"""Functions as a user may write them for `env.function.path`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, str]]


def shorter_is_better(messages: Messages, entry: Mapping[str, Any], scale: float = 1.0) -> float:
    return scale / len(messages[-1]["content"])


def try_again(messages: Messages, entry: Mapping[str, Any]) -> dict[str, Any]:
    right = messages[-1]["content"] == entry["answer"]
    return {"reward": float(right), "observation": None if right else "Wrong. Again: ", "done": right}


def fails(messages: Messages, entry: Mapping[str, Any]) -> float:
    raise KeyError("no such thing")


def returns(messages: Messages, entry: Mapping[str, Any], what: Any = None) -> Any:
    return what


def sleeps(messages: Messages, entry: Mapping[str, Any]) -> float:
    time.sleep(60 if messages[-1]["content"] == "slow" else 0)
    return 1.0


NOT_CALLABLE = 3
