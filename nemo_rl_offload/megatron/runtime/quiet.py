"""Keeps what other libraries say to themselves away from the user; imports nothing heavy, to be there before them."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron-Core and Bridge report every optional feature that they miss, at import and per layer; none concerns
    the user. Errors in logs are still seen."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
