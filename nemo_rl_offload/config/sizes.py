"""Sizes as people write them."""

import re
from typing import Literal

from nemo_rl_offload.errors import ConfigError

LengthRound = int | Literal["power_of_two"]

_SIZE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"32GiB"`` or ``"1.5 MiB"``. Raises ConfigError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", text.strip())
    size_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]]) if match else 0
    if size_bytes == 0:
        raise ConfigError(f"'{text}' is not a size. Write a number and one of {', '.join(_SIZE_UNITS)}, like 32GiB.")
    return size_bytes


def rounded_length(length: int, rounding: LengthRound) -> int:
    """Return the next length, in tokens, that is a multiple of a number or a power of two."""
    if rounding == "power_of_two":
        return 1 << (length - 1).bit_length()
    return -(-length // rounding) * rounding
