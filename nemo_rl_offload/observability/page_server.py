"""A page that follows a run while it runs: `nemo-rl-offload report RUN_DIR --serve`.

Python's own HTTP server on the loopback interface makes the page anew for each request; a script of a few lines in it
asks every `REFRESH_S` seconds whether the run's files have changed, and takes the new text where they have. What the
reader has opened stays open. Nothing else is loaded, from here or elsewhere, which a content security policy keeps.

A page of another site could ask for ours under a name of its own that it lets point to 127.0.0.1. So a request is
answered only where its Host is an address or name of this machine's loopback.
"""

import os
import sys
from collections.abc import Callable, Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError
from nemo_rl_offload.observability.page import framed

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
REFRESH_S = 3
SCRIPT = """
let tag = null;
async function refresh() {
  try {
    const answer = await fetch('/', {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store'});
    if (answer.status == 200) {
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const next = page.querySelector('main');
      const isOpen = Array.from(document.querySelectorAll('details[open] > summary'), each => each.textContent);
      for (const summary of next.querySelectorAll('details > summary'))
        if (isOpen.includes(summary.textContent)) summary.parentElement.open = true;
      if (tag) document.querySelector('main').replaceWith(next);
      document.title = page.title;
      tag = answer.headers.get('ETag');
    }
    document.body.dataset.updated = 1 + Number(document.body.dataset.updated || 0);
    document.getElementById('state').textContent = 'as of ' + new Date().toLocaleTimeString();
  } catch { document.getElementById('state').textContent = 'the page is not served any more'; }
}
refresh();
setInterval(refresh, PERIOD_MS);
""".replace("PERIOD_MS", str(1000 * REFRESH_S))
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STATE = "<p id='state' class='note'></p>"


class PageServer(ThreadingHTTPServer):
    """Serves one page at `/`, to this machine alone.

    Args:
        port: 0 takes a free one.
        make: makes the page, with a script. A NemoRLOffloadError of its is shown in the page's place.
        files: by whose sizes and times it is told whether the page has changed; folders among them.

    Raises:
        ConfigError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, make: Callable[[str], str], files: Sequence[Path]) -> None:
        self._make, self._files = make, files
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}. Give another one, or none for a free one.") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over readers that have gone, as a closed tab; anything else is shown as the standard library does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """For a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def tag(self) -> str:
        """Is another one after each change of the files."""
        found = []
        for file in self._files:
            try:
                status = os.lstat(file)
            except OSError:
                continue
            found.append(f"{status.st_ino:x}.{status.st_size:x}.{status.st_mtime_ns:x}")
        return f'"{"-".join(found)}"'

    def page(self) -> str:
        """The page as it is now."""
        try:
            return self._make(SCRIPT).replace("</h1>", f"</h1>{STATE}", 1)
        except NemoRLOffloadError as error:  # such as a run that has logged nothing yet
            return framed("nemo-rl-offload", [STATE, f"<p>{escape(str(error))}</p>"], script=SCRIPT)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "nemo-rl-offload", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "Ask by an address of this machine's loopback")
        elif urlsplit(self.path).path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        elif self.headers.get("If-None-Match") == (tag := self.server.tag()):
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
        else:
            content = self.server.page().encode(errors="backslashreplace")
            self.send_response(HTTPStatus.OK)
            for name, value in (
                ("Content-Type", "text/html; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Content-Security-Policy", POLICY),
                ("X-Content-Type-Options", "nosniff"),
                ("Cache-Control", "no-store"),
                ("ETag", tag),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing: a request comes every few seconds."""
