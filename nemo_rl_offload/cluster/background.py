"""Work that goes on in a thread of its own, which a program that ends does not wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_background[R](work: Callable[[], R], name: str) -> Future[R]:
    """Begin it; the future has its result, or raises as it does."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
