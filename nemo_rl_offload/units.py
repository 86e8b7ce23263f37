"""Bytes and durations: their units, and how people read and write them."""

import re

from nemo_rl_offload.errors import ConfigError

KIB, MIB, GIB, TIB = (1 << bits for bits in (10, 20, 30, 40))
_SIZE_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``"32GiB"`` or ``"1.5 MiB"``. Raises ConfigError if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", text.strip())
    if match is None:
        given = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])iB", text.strip(), re.IGNORECASE)
        like = f"{given[1]}{given[2].upper()}iB" if given else "32GiB"
        raise ConfigError(f"'{text}' is not a size. Write a number and one of {', '.join(_SIZE_UNITS)}, like {like}.")
    size_bytes = int(float(match[1]) * _SIZE_UNITS[match[2]])
    if size_bytes == 0:
        raise ConfigError(f"'{text}' is not a size above 0. Write one, like 32GiB.")
    return size_bytes


def parse_duration(text: str) -> int:
    """Return the seconds of ``"DD:HH:MM:SS"``. Raises ConfigError if it is none."""
    match = re.fullmatch(r"(\d+):(\d\d):([0-5]\d):([0-5]\d)", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"'{text}' is not a duration. Write days, hours, minutes and seconds, like 00:03:45:00.")
    days, hours, minutes, seconds = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def human_bytes(num_bytes: float | None) -> str:
    """Return a size in binary units with three significant digits, such as ``1.25 GiB``; ``-`` for None."""
    if num_bytes is None:
        return "-"
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{size:.0f} B"
    decimals = max(0, 3 - len(f"{abs(size):.0f}"))
    return f"{size:.{decimals}f} {unit}"


def gib(num_bytes: float, decimals: int = 1) -> str:
    """Return a size in GiB, such as ``0.3 GiB``, for sizes that are compared; smaller units where that is 0."""
    return f"{num_bytes / GIB:.{decimals}f} GiB" if round(num_bytes / GIB, decimals) else human_bytes(num_bytes)


def human_duration(seconds: float | None) -> str:
    """Return a time such as ``1:02:03``; ``-`` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
