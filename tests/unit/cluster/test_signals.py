import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from nemo_rl_offload.cluster.signals import Held


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """SIGINT as at a terminal, whatever starts the tests; both as before afterwards."""
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["int", "term"]
)
@pytest.mark.parametrize("fails", [False, True])
def test_takes_effect_afterwards(
    number: int, error: type[BaseException], fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    done = []

    def start() -> None:
        with Held("the start"):
            signal.raise_signal(number)
            done.append("went on")
            if fails:
                raise RuntimeError

    with pytest.raises(error):
        start()
    assert done == ["went on"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().err == "Ending as soon as the start is done; a second time, at once ...\n"


def test_rays_alarm_is_forgotten() -> None:
    def start() -> None:
        with Held("the start"):
            signal.alarm(600)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        start()
    assert signal.alarm(0) == 0


def test_a_second_one_takes_effect_at_once() -> None:
    done = []

    def start() -> None:
        with Held("the start"):
            signal.raise_signal(signal.SIGINT)
            done.append("went on")
            signal.raise_signal(signal.SIGTERM)
            done.append("went on again")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["went on"]


def test_what_is_ignored_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Held("the start"):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == ""


def test_nothing_happens_in_other_threads() -> None:
    done = []

    def start() -> None:
        with Held("the start"):
            done.append("started")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert done == ["started"]


def test_all_wait_while_there_is_patience(capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def end(patience_s: float) -> None:
        with Held("the end", patience_s):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
                done.append(number)

    with pytest.raises(SystemExit):
        end(60)
    assert len(done) == 3
    assert capsys.readouterr().err == "Ending as soon as the end is done ...\n"
    with pytest.raises(SystemExit):
        end(0)
    assert len(done) == 4
