"""The process of NeMo-Gym, with a Python that plays its part."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from nemo_rl_offload.environments.nemo_gym import child
from nemo_rl_offload.environments.nemo_gym.process import GymProcess
from nemo_rl_offload.errors import ConfigError, WorkerError

PLAYS = """#!{python}
import json, os, subprocess, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)
config = json.loads(sys.stdin.readline())
print("a server says " + config["word"], file=sys.stderr, flush=True)
if config["word"] == "ends":
    sys.exit(3)
beside = subprocess.Popen(["sleep", "600"])
print(json.dumps({{"agents": ["asker"], "beside": beside.pid}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["row"] == "die":
        os._exit(4)
    print(json.dumps({{"number": asked["number"], "result": asked["row"]}}), flush=True)
if config["word"] == "stays":
    time.sleep(600)
"""
Start = Callable[[str], GymProcess]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    started: list[GymProcess] = []
    python = tmp_path / "python"
    python.write_text(PLAYS.format(python=sys.executable))
    python.chmod(0o755)

    def begin(word: str) -> GymProcess:
        started.append(GymProcess(python, {"word": word}, tmp_path / "log"))
        return started[-1]

    yield begin
    for each in started:
        each.stop(at_once=True)


def test_all_threads_that_wait_hear_of_the_start(start: Start) -> None:
    process, heard = start("goes on"), list[Any]()
    threads = [threading.Thread(target=lambda: heard.append(process.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert heard == [("asker",)] * 3


def test_all_threads_that_wait_hear_of_a_failed_start(start: Start) -> None:
    process, heard = start("ends"), list[str]()

    def wait() -> None:
        with pytest.raises(WorkerError) as caught:
            process.wait()
        heard.append(str(caught.value))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(heard) == 3
    assert all("ended with code 3" in each and "a server says ends" in each for each in heard)


def test_answers_go_to_who_asked(start: Start) -> None:
    process = start("goes on")
    process.wait()
    queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    numbers = [process.ask({"n": place}, queues[place % 2]) for place in range(6)]
    for place, number in enumerate(numbers):
        assert queues[place % 2].get(timeout=PATIENCE_S) == (number, {"number": number, "result": {"n": place}})
    process.check()
    row: Any = "die"
    process.ask(row, queues[0])
    process._process.wait(PATIENCE_S)
    with pytest.raises(WorkerError, match="ended with code 4"):
        process.check()


@pytest.mark.parametrize("at_once", [True, False])
def test_the_end_leaves_nothing(start: Start, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_offload.environments.nemo_gym.process.END_S", 0.5)
    process = start("stays")
    process.wait()
    group = process._process.pid
    process.stop(at_once=at_once)
    process.stop(at_once=at_once)
    assert is_gone(group)


def is_gone(group: int) -> bool:
    """Whether all of a group of processes end within seconds; zombies are others' to fetch."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


SLOW_GYM = {
    "nemo_gym/cli/env.py": """
import subprocess, time
class RunHelper:
    def start(self, parser):
        print("starts", flush=True)
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
""",
    "nemo_gym/global_config.py": """
GlobalConfigDictParserConfig = dict
def get_global_config_dict(): ...
""",
}
DRIVER = """
import os, subprocess, sys
command, pipe = [sys.executable, sys.argv[1], str(os.getpid())], subprocess.PIPE
child = subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, start_new_session=True)
child.stdin.write("{}\\n")
child.stdin.flush()
assert child.stderr.readline() == "starts\\n"
print(child.pid, flush=True)
child.wait()
"""


def test_servers_that_start_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    for name, text in SLOW_GYM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER, child.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as driver:
        assert driver.stdout is not None
        group = int(driver.stdout.readline())
        driver.kill()
    assert is_gone(group)


def test_a_python_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no nemo-gym \(ModuleNotFoundError.*`uv venv"):
        GymProcess(Path(sys.executable), {}, tmp_path / "log")
    with pytest.raises(ConfigError, match="is no program"):
        GymProcess(tmp_path, {}, tmp_path / "log")
    (broken := tmp_path / "python").write_bytes(b"\0")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is no interpreter: .*Exec format error"):
        GymProcess(broken, {}, tmp_path / "log")
    with pytest.raises(ConfigError, match="there is no"):
        GymProcess(tmp_path / "none", {}, tmp_path / "log")
