"""What the watchdog ends once its driver was killed, and what it lets live."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
from patience import PATIENCE_S

from nemo_rl_offload.cluster import watchdog

DRIVER = """
import os, subprocess, sys, time
script, folder, other = sys.argv[1:]
def start(*words, **given):
    process = subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL, **given)
    print(process.pid, flush=True)
start(sys.executable, "-I", "-S", script, str(os.getpid()), folder)
start("sleep", "60", stdout=open(folder + "/agent.log", "w"))
start("sh", "-c", "sleep 60; true", "--temp-dir=" + folder + "/ray", stdout=subprocess.DEVNULL)
start("tail", "-f", folder + "/agent.log", stdout=subprocess.DEVNULL)
start("sleep", "60", stdout=open(other + "/agent.log", "w"))
time.sleep(60)
"""


def test_who_belongs_to_the_ray_ends_with_the_driver(tmp_path: Path) -> None:
    folder, other = tmp_path / "ray", tmp_path / "ray2"
    folder.mkdir()
    other.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", DRIVER, watchdog.__file__, str(folder), str(other)], stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    guard, agent, daemon, reader, stranger = (psutil.Process(int(driver.stdout.readline())) for _ in range(5))
    try:
        time.sleep(3 * watchdog.POLL_S)
        assert all(process.is_running() for process in (guard, agent, daemon, reader, stranger))
        driver.kill()
        driver.wait()
        gone, _ = psutil.wait_procs([agent, daemon], timeout=PATIENCE_S)
        assert {process.pid for process in gone} == {agent.pid, daemon.pid}
        time.sleep(2 * watchdog.POLL_S)
        assert reader.status() != psutil.STATUS_ZOMBIE
        assert stranger.status() != psutil.STATUS_ZOMBIE
    finally:
        driver.kill()
        for process in (guard, agent, daemon, reader, stranger):
            for each in [*(process.children() if process.is_running() else []), process]:
                if each.is_running():
                    each.kill()
