"""Work in a thread of its own."""

import threading

import pytest

from nemo_rl_offload.cluster.background import in_background


def test_its_result_comes_when_it_is_there() -> None:
    go = threading.Event()

    def work() -> str:
        go.wait()
        assert threading.current_thread().daemon
        return threading.current_thread().name

    future = in_background(work, "a name")
    assert not future.done()
    go.set()
    assert future.result() == "a name"


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_it_raises_whoever_waits_gets(error: BaseException) -> None:
    def work() -> None:
        raise error

    assert in_background(work, "a name").exception() is error
