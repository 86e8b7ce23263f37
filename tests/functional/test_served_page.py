"""The served page in a browser: headless Chromium, driven by its chromedriver over plain HTTP (W3C WebDriver)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from run_dirs import add_step, make_run

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromedriver") and shutil.which("chromium")),
        reason="no browser: Debian's packages chromium and chromium-driver bring it",
    ),
]
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
LOG = {"performance": "ALL", "browser": "ALL"}


class Browser:
    """A session of chromedriver."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}/session"
        wanted = {"goog:loggingPrefs": LOG, "goog:chromeOptions": {"args": OPTIONS}}
        session = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{session['sessionId']}"

    def _ask(self, path: str, body: Any) -> Any:
        content = {"data": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}
        with urllib.request.urlopen(
            urllib.request.Request(self._address + path, **content), timeout=PATIENCE_S
        ) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._ask("/url", {"url": "about:blank"})
        for kind in LOG:  # the page before, whose server has gone, has said so
            self.log(kind)
        self._ask("/url", {"url": address})

    def run(self, script: str) -> Any:
        return self._ask("/execute/sync", {"script": f"return {script}", "args": []})

    def set(self, command: str, **parameters: object) -> None:
        """A command of the DevTools."""
        self._ask("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self, kind: str) -> list[Any]:
        """New entries of the console, or of the network."""
        found: list[Any] = self._ask("/se/log", {"type": kind})
        return found

    def wait_for(self, script: str) -> None:
        assert eventually(lambda: self.run(script)), self.run("document.body.innerText")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "started successfully on port" in line)
        yield Browser(int(line.strip().rstrip(".").split()[-1]))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Serves runs by the command; returns the address."""
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT), prepend=os.pathsep)
    processes: list[subprocess.Popen[str]] = []

    def start(*run_dirs: Path) -> str:
        command = [sys.executable, "-m", "nemo_rl_offload.cli", "report", *map(str, run_dirs), "--serve"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        return processes[-1].stdout.readline().split()[1]

    yield start
    for process in processes:
        process.terminate()
        assert process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0


def requested(browser: Browser) -> set[str]:
    """Where requests went."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    sent = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return {url for url in sent if not url.startswith("data:")}


def test_a_page_that_follows_a_run(browser: Browser, serve: Callable[..., str], tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 0)
    address = serve(run_dir)
    browser.open(address)
    browser.wait_for("document.body.innerText.includes('the run has logged nothing yet')")
    browser.wait_for("document.body.dataset.updated == 1")
    add_step(run_dir, 1)
    add_step(run_dir, 2)
    browser.wait_for("document.querySelectorAll('polyline').length > 3")
    browser.run("(document.querySelectorAll('details').forEach(each => each.open = true), window.scrollTo(0, 99), 0)")
    num_open = browser.run("document.querySelectorAll('details[open]').length")
    assert num_open >= 3
    add_step(run_dir, 3)
    browser.wait_for("document.querySelector('td + td').textContent == '3'")
    assert browser.run("document.querySelectorAll('details[open]').length") == num_open
    assert browser.run("window.scrollY") == 99
    for text in ("Curves", "Samples", "Memory over step 3", "Timings", "Warnings", "<no> room", "as of "):
        assert browser.run(f"document.body.innerText.includes({json.dumps(text)})"), text
    heights = "Array.from(document.querySelectorAll('figure svg'), each => each.getBoundingClientRect().height)"
    drawn = browser.run(heights)
    assert min(height for height in drawn if height) > 50
    assert [entry for entry in browser.log("browser") if entry["level"] != "INFO"] == []
    assert requested(browser) == {address}, "no other place, and so none of a network's"


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("num_runs", [1, 4])
def test_narrow_and_dark(num_runs: int, mode: str, browser: Browser, serve: Callable[..., str], tmp_path: Path) -> None:
    browser.set("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    browser.set("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}])
    name = "a-name-that-is-too-long-for-a-telephone-" * 3
    browser.open(serve(*[make_run(tmp_path / f"{name}{number}", lr=number) for number in range(num_runs)]))
    browser.wait_for("document.querySelectorAll('polyline').length > 3")
    browser.run("(document.querySelectorAll('details').forEach(each => each.open = true), 0)")
    assert browser.run("document.documentElement.scrollWidth") <= 400, "tables scroll by themselves"
    back, text = (
        sum(map(int, browser.run(f"getComputedStyle(document.body).{what}").strip("rgb()").split(",")))
        for what in ("backgroundColor", "color")
    )
    assert (back < 150 < 500 < text) if mode == "dark" else (text < 200 < 700 < back)
    assert [entry for entry in browser.log("browser") if entry["level"] != "INFO"] == []
