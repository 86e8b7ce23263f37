"""Sizes as people write them."""

import re

from nemo_rl_offload.errors import ConfigError

_SIZE_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"32GiB"`` or ``"1.5 MiB"``. Raises ConfigError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is not a size. Write a number and one of {', '.join(_SIZE_UNITS)}, like 32GiB.")
    size_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if size_bytes == 0:
        raise ConfigError(f"'{text}' is not a size above 0. Write one, like 32GiB.")
    return size_bytes
