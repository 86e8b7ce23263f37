import io
import re

import pytest

from nemo_rl_offload.observability import progress as progress_module
from nemo_rl_offload.observability.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps_shown(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("total", "first", "shown"),
    [(25, 1, [1, 10, 20, 25]), (20, 1, [1, 10, 20]), (1, 1, [1]), (25, 13, [13, 20, 25])],
)
def test_lines_off_a_terminal(total: int, first: int, shown: list[int]) -> None:
    stream = io.StringIO()
    with Progress(total, enabled=True, stream=stream) as progress:
        for step in range(first, total + 1):
            progress.update(step, reward=0.5)
    assert steps_shown(stream.getvalue()) == shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_note_is_a_line_of_its_own(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = f"warning: [red]{'long ' * 40}end"
    with Progress(25, enabled=True, stream=stream) as progress:
        progress.update(1, reward=0.5)
        progress.note(text)
        progress.update(2, reward=0.5)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert text in re.split(r"[\r\n]+", plain)


def test_fields_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(1000, enabled=True, stream=stream) as progress:
        now[0] += 8.0  # two steps, 11 and 12, in this time
        progress.update(11)
        progress.update(12)
        stream.truncate(0)
        progress.update(20, reward=0.41239, loss=None, tokens_per_s=12345.6, offloaded_bytes=3 << 20, extra=1e-7)
    # ten steps in 8 s, 980 left
    assert stream.getvalue().lstrip("\0") == (
        "step 20/1000  0:13:04 left  reward 0.412  12,346 tokens/s  3.00 MiB offloaded  extra 1e-07\n"
    )


def test_terminal_gets_a_bar_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(20, enabled=True, stream=stream) as progress:
        progress.update(7, reward=0.412, loss=0.0123)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    assert last.startswith("7/20")
    assert "reward 0.412  loss 0.0123" in last
    assert len(last) <= 80
    assert not steps_shown(plain)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, "reward 0.567  loss 0.00097  3,590 tokens/s  35.2 MiB offloaded"),
        (80, "reward 0.567  loss 0.00097  3,590 tokens/s"),
        (60, "reward 0.567  loss 0.00097"),
        (40, ""),
    ],
)
def test_on_a_narrow_terminal_the_last_figures_give_way_and_the_step_stays(
    width: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(40, enabled=True, stream=stream) as progress:
        progress.update(10, reward=0.567, loss=0.00097, tokens_per_s=3590.0, offloaded_bytes=36_900_000)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    assert re.fullmatch(rf"10/40 \S{{10}} \d:\d\d:\d\d left *{re.escape(shown)}", last)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_disabled_is_silent(stream: io.StringIO) -> None:
    with Progress(5, enabled=False, stream=stream) as progress:
        progress.update(1, reward=1.0)
    assert stream.getvalue() == ""


def test_generation_that_takes_long_is_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(5, enabled=True, stream=stream) as progress:
        for second in range(1, 101):
            now[0] += 1
            progress.generating(second, 100, 1000 * second, second)
        now[0] += 100
        for second in range(1, 30):  # another call, which ends soon
            progress.generating(second, 100, 1000 * second, second)
    assert stream.getvalue().splitlines() == [
        f"generating: {second} of 100 responses  1,000 tokens/s" for second in (30, 60, 90)
    ]


def test_generation_on_a_terminal_is_part_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(5, enabled=True, stream=stream) as progress:
        progress.update(1, reward=0.5)
        progress.generating(3, 64, 512, 0.25)
        assert "generating" in str(progress._bar.tasks[0].description)
        progress.generated()
        assert "reward 0.5" in str(progress._bar.tasks[0].description)
        progress.generating(3, 64, 512, 0.25)
    assert "generating: 3 of 64 responses  2,048 tokens/s" in stream.getvalue()
    assert stream.getvalue().count("\n") <= 2
