import logging
import warnings
from collections.abc import Iterator

import pytest

from nemo_rl_offload.observability.notices import PACKAGE, Notices


@pytest.fixture
def notices() -> Iterator[Notices]:
    found = Notices()
    yield found
    found.close()


def test_records_of_this_package_from_now_on(notices: Notices) -> None:
    logger = logging.getLogger("nemo_rl_offload.offload.arena")
    logger.warning("%d pages", 3)
    logger.info("no warning")
    logging.getLogger("nemo_rl").warning("another package")
    assert notices.take() == ["3 pages"]
    assert notices.take() == []


def test_warnings_are_shown_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    before = warnings.showwarning
    notices = Notices()
    warnings.showwarning("no room", UserWarning, str(PACKAGE / "offload/arena.py"), 7)
    warnings.showwarning("not ours", UserWarning, f"{PACKAGE}_else/arena.py", 7)
    notices.close()
    assert warnings.showwarning is before
    logging.getLogger(PACKAGE.name).warning("too late")
    assert notices.take() == ["no room"]
    assert shown == ["no room", "not ours"]
