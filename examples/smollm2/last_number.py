"""A reward for `env.function.path`: the last number of a response is the record's answer."""

import re
from collections.abc import Mapping, Sequence

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(messages: Sequence[Mapping[str, str]], entry: Mapping[str, str]) -> float:
    """1 where the last number in the last message is the answer, a whole number; else 0."""
    numbers = _NUMBER.findall(messages[-1]["content"])
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == int(entry["answer"]))
