"""`samples.jsonl`: what the model was asked and what it said, for people to read and for the report.

A run that goes on from a checkpoint takes its steps again, and samples other responses there. So before it begins, the
lines of later steps than the checkpoint's are taken out: each step has its lines once. Metrics are not handled so;
there a reader takes the last of a step, which among several samples of a step cannot be told.

The file is besides, as logs are: what cannot be written is told once, and the run goes on. A text is cut in its middle
where it is longer than `LONGEST_TEXT`, which bounds the file by the number of lines.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.runs.output import OptionalLog, without_nan
from nemo_rl_offload.runs.plain_files import written_anew
from nemo_rl_offload.runs.run_directory import SAMPLES_FILE
from nemo_rl_offload.runs.run_files import SampleRecord
from nemo_rl_offload.specs.documents import DocumentError, bounded_lines, open_plain, parse_json

LONGEST_TEXT = 20_000
"""Characters of a prompt or a response that are kept."""


def shortened(text: str, num_characters: int) -> str:
    """A text without its middle, where it is longer than that."""
    left_out = len(text) - num_characters
    if left_out <= 0:
        return text
    begin = (num_characters + 1) // 2
    return f"{text[:begin]} [... {left_out} characters ...] {text[begin + left_out :]}"


class SampleLog:
    """Adds to the file of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SAMPLES_FILE
        self._log = OptionalLog(self._path)

    def append(self, records: Sequence[SampleRecord]) -> list[str]:
        """Add lines; returns what the user should hear of that, which is mostly nothing."""
        return self._log.append("".join(map(_line, records))) if records else []

    def forget_after(self, step: int | None) -> list[str]:
        """Take out the lines of later steps, or all, and what is no JSON. Returns as `append` does."""
        try:
            with open_plain(self._path, follows_links=False) as file:
                kept = [line is not None and _is_until(step, line) for line in bounded_lines(file)]
                if all(kept):
                    return []
                file.seek(0)
                with written_anew(self._path) as other:
                    for line, stays in zip(bounded_lines(file), kept, strict=True):
                        if stays and line is not None:
                            other.write(line)
        except FileNotFoundError:
            return []
        except (OSError, ConfigError) as error:
            reason = getattr(error, "strerror", None) or error
            return [f"{self._path}: cannot be written: {reason}. It may have lines of steps that are taken again."]
        return []


def _line(record: SampleRecord) -> str:
    """JSON in which every letter stands as it is, and nothing that a terminal obeys."""
    short = {**record, **{key: shortened(record[key], LONGEST_TEXT) for key in ("prompt", "response")}}
    text = json.dumps(without_nan(short), ensure_ascii=False, allow_nan=False)
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text) + "\n"


def _is_until(step: int | None, line: bytes) -> bool:
    if step is None or not line.endswith(b"\n"):
        return False
    try:
        content = parse_json(line.decode())
    except (ValueError, DocumentError):
        return False
    found = content.get("step") if isinstance(content, dict) else None
    return not isinstance(found, int) or found <= step  # without a step it is somebody else's
