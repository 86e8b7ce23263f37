"""What this project warns of in a worker, whose output ends in a log file of Ray's, for the driver to show."""

import logging
import warnings
from pathlib import Path
from typing import TextIO

PACKAGE = Path(__file__).parent.parent


class Notices(logging.Handler):
    """Collects this process's warnings that come from this package, logged or by `warnings.warn`, from now on.

    They still go where they went before. Those of other packages are left out: they are many, and rarely about
    anything that a user of this one can change.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        self._show = warnings.showwarning
        warnings.showwarning = self._collect
        logging.getLogger(PACKAGE.name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text."""
        self._texts.append(record.getMessage())

    def take(self) -> list[str]:
        """The texts since the last call."""
        texts, self._texts = self._texts, []
        return texts

    def close(self) -> None:
        """Collect no more."""
        warnings.showwarning = self._show
        logging.getLogger(PACKAGE.name).removeHandler(self)
        super().close()

    def _collect(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).is_relative_to(PACKAGE):
            self._texts.append(str(message))
        self._show(message, category, filename, lineno, file, line)
