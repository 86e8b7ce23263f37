"""What a scorer may do to its process: the response counts 0, the others and the run do not notice."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, eventually, is_running
from user_functions import MISDEEDS

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.environments.pool import EnvironmentPool
from nemo_rl_offload.environments.worker import _limit_memory
from nemo_rl_offload.errors import ConfigError, WorkerError

HERE = str(Path(__file__).parent)
FAILED = Score(0.0, is_correct=False, scorer_error=True)
RIGHT = Score(1.0, is_correct=True, scorer_error=False)
TOLD = {
    "an exception": r"raised ValueError: bad \\ud800\\x1b\[31m value \(\S+user_functions.py:\d+\)",
    "one without a message": r"raised UnprintableError: \(a message that cannot be shown\) \(",
    "no exception": r"raised NoExceptionError: timed out \(",
    "an exit": r"raised SystemExit: 3 \(",
    "an interrupt": r"raised KeyboardInterrupt \(",
    "the end of a generator": r"raised GeneratorExit \(",
    "recursion": r"raised RecursionError: maximum recursion depth exceeded \(",
    "an end of the process": "took its process with it, which ended with code 0",
    "an end while a child lives": "took its process with it, which ended with code 1",
    "a segmentation fault": "took its process with it, which ended by SIGSEGV",
    "an abort": "took its process with it, which ended by SIGABRT",
    "the OOM killer": r"took its process with it, which was killed \(SIGKILL\), perhaps because memory ran out",
    "an alarm": "took its process with it, which ended by SIGALRM",
    "memory": r"raised MemoryError \(\S+\); memory_limit is 300MiB",
    "a hang in C": r"took longer than timeout_s 2\. ",
}
"""What is told of each kind; the other misdeeds are of a kind with one of these."""
QUICK = ("an exception", "no exception", "an exit", "an end of the process", "an abort", "memory", "a hang in C")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, HERE])


def function(name: str, *overrides: str) -> list[str]:
    return ["data.env_name=function", f"env.function.path=user_functions:{name}", *overrides]


def episodes(*responses: str) -> list[Episode]:
    return [Episode({"answer": "right"}, [{"role": "assistant", "content": text}]) for text in responses]


def processes(pool: EnvironmentPool) -> list[int]:
    return [worker.process._process.pid for worker in pool._workers]


@pytest.mark.parametrize("misdeeds", [QUICK, pytest.param([*MISDEEDS], marks=pytest.mark.slow)], ids=["some", "all"])
def test_whatever_a_scorer_does_costs_its_own_response_alone(
    misdeeds: Sequence[str], make_pool: Callable[..., EnvironmentPool]
) -> None:
    limits = ("timeout_s=2", "memory_limit=300MiB", "num_workers=2")
    pool = make_pool(*function("misbehaves", *(f"env.function.{limit}" for limit in limits)))
    asked = [text for misdeed in misdeeds for text in (misdeed, "good")]
    scores = pool.step(episodes(*asked))
    assert [score for text, score in zip(asked, scores, strict=True) if text == "good"] == [RIGHT] * len(misdeeds)
    assert dict(zip(asked, scores, strict=True)) == {**dict.fromkeys(misdeeds, FAILED), "good": RIGHT}
    notices = pool.notices()
    for misdeed, words in ((misdeed, TOLD[misdeed]) for misdeed in misdeeds if misdeed in TOLD):
        told = [text for text in notices if re.search(rf"env\.function: the scorer {words}", text)]
        assert len(told) == 1, (misdeed, notices)
        assert told[0].isprintable()
    assert len(notices) <= len(TOLD)
    assert pool.step(episodes("an exit", "good")) == [FAILED, RIGHT]
    assert pool.notices() == [], "told already"
    assert pool.step(episodes("an exit", "an abort")) == [FAILED] * 2
    assert pool.notices() == ["env.function: none of the 2 responses of this turn could be scored; all count 0."]


def test_one_that_raises_the_same_on_every_first_response_ends_the_run(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path
) -> None:
    pool = make_pool(*function("misbehaves"), run_dir=tmp_path)
    with pytest.raises(WorkerError, match=r"on each of the first 3 responses.*: ValueError: bad .*\. Mend it, or"):
        pool.step(episodes(*["an exception"] * 3))
    assert "Traceback" in (tmp_path / "scorers.log").read_text()


@pytest.mark.parametrize("asked", ["an end of the process", "an abort"])
def test_one_that_ends_its_process_on_every_first_response_ends_the_run(
    asked: str, make_pool: Callable[..., EnvironmentPool]
) -> None:
    pool = make_pool(*function("misbehaves"))
    with pytest.raises(WorkerError, match=r"failed alike on each of the first 3 responses.*: its process .*\. Mend it"):
        pool.step(episodes(*[asked] * 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [["an exception", "an exit"], ["an exception"], ["an abort"], ["a hang in C"] * 2],
    ids=["two kinds", "one response", "one crash", "late"],
)
def test_others_do_not(asked: list[str], make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("misbehaves", "env.function.timeout_s=2"))
    assert pool.step(episodes(*asked)) == [FAILED] * len(asked)
    assert pool.step(episodes("good", "good")) == [RIGHT] * 2
    assert pool.step(episodes("an exception", "an exception")) == [FAILED] * 2, "it has scored before"


def test_a_child_that_leaves_its_scorer_answers_nobody(make_pool: Callable[..., EnvironmentPool]) -> None:
    """It answered too, and each of the process's later responses had the reward of the one before."""
    pool = make_pool(*function("forks", "env.function.num_workers=1"))
    ways = {"returns": 1 / 8, "raises": 2 / 8, "5": 6 / 8, "0": 1 / 8, "plain": 1.0}
    for _ in range(2):
        assert [score.reward for score in pool.step(episodes(*ways))] == [*ways.values()]
    assert pool.notices() == []


def test_an_observation_with_half_a_character_costs_its_response(make_pool: Callable[..., EnvironmentPool]) -> None:
    """No tokenizer takes it."""
    pool = make_pool(*function("half_a_character"))
    assert pool.step(episodes("x")) == [FAILED]
    assert "raised UnicodeEncodeError: 'utf-8' codec can't encode character" in pool.notices()[0]


@pytest.mark.parametrize(("there", "expected"), [(resource.RLIM_INFINITY, 500), (900, 500), (300, 300)])
def test_a_limit_that_is_there_already_is_kept(there: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (there, there))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append((kind, pair)))
    _limit_memory(500)
    assert limits == [(resource.RLIMIT_DATA, (expected, expected))]


@pytest.mark.slow
def test_a_response_does_not_pay_for_what_others_left(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("keeps", "env.function.memory_limit=400MiB"))
    rewards = [score.reward for score in pool.step(episodes("50", "50", "120", "350", "50"))]
    assert rewards == [1, 2, 3, 1, 1], "more than half of the limit is held after the third, and after the fourth"
    assert [score.reward for score in pool.step(episodes("250", "500", "1"))] == [2, 0, 1]


def test_memory_of_earlier_responses_is_no_failure(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("keeps", "env.function.memory_limit=400MiB"))
    assert pool.step(episodes("150", "350")) == [RIGHT, RIGHT], "the second try has all the memory"


def test_a_process_that_ends_late_costs_no_innocent(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("ends_late"))
    assert pool.step(episodes("dies later", "next", "last")) == [RIGHT] * 3
    (notice,) = pool.notices()
    assert notice.endswith(". The response was scored in another.")


@pytest.mark.slow
def test_a_process_that_was_killed_while_it_waited_is_replaced(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("misbehaves"))
    for _ in range(4):
        assert pool.step(episodes("good")) == [RIGHT]
        (pid,) = processes(pool)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda pid=pid: not is_running(pid))
    assert pool.step(episodes("good", "good")) == [RIGHT] * 2
    assert pool.notices() == []


@pytest.mark.slow
def test_a_process_that_was_stopped_while_it_waited_is_replaced(
    make_pool: Callable[..., EnvironmentPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is longer than what the connection holds for one that does not read."""
    monkeypatch.setattr("nemo_rl_offload.environments.process.SEND_TIMEOUT_S", 1)
    pool = make_pool(*function("misbehaves"))
    assert pool.step(episodes("good")) == [RIGHT]
    os.kill(processes(pool)[0], signal.SIGSTOP)
    assert pool.step(episodes("good" * 1_000_000)) == [RIGHT]


def test_it_imports_what_scoring_needs_and_sees_no_gpu(
    make_pool: Callable[..., EnvironmentPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert make_pool(*function("is_alone")).step(episodes("x")) == [RIGHT]


def test_what_a_scorer_prints_is_kept_apart(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(*function("shouts"), run_dir=tmp_path)
    assert pool.step(episodes("x", "y")) == [RIGHT] * 2
    pool.shutdown()
    assert capfd.readouterr() == ("", "")
    kept = (tmp_path / "scorers.log").read_text()
    for words in ("a line to standard output", "bytes to standard output", "bytes to standard error"):
        assert kept.count(words) == 2


def test_the_traceback_of_a_failure_is_kept(make_pool: Callable[..., EnvironmentPool], tmp_path: Path) -> None:
    pool = make_pool(*function("misbehaves"), run_dir=tmp_path)
    pool.step(episodes("an exit", "an exit", "good"))
    pool.shutdown()
    assert (tmp_path / "scorers.log").read_text().count('"an exit": lambda: sys.exit(3)') == 1


@pytest.mark.parametrize("kind", ["a folder", "a link", "gone"])
def test_a_log_that_cannot_be_written_is_told_once(
    kind: str, make_pool: Callable[..., EnvironmentPool], tmp_path: Path
) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("somebody's")
    if kind != "gone":
        run_dir.mkdir()
    if kind == "a folder":
        (run_dir / "scorers.log").mkdir()
    if kind == "a link":
        (run_dir / "scorers.log").symlink_to(victim)
    pool = make_pool(*function("misbehaves"), run_dir=run_dir)
    assert [score.reward for score in pool.step(episodes("an exit", "good"))] == [0, 1]
    pool.shutdown()
    told = [text for text in pool.notices() if "scorers.log" in text]
    assert len(told) == 1
    assert "scorers.log: cannot be written: " in told[0]
    assert victim.read_text() == "somebody's"


def test_nothing_printed_leaves_no_file(make_pool: Callable[..., EnvironmentPool], tmp_path: Path) -> None:
    pool = make_pool(*function("misbehaves"), run_dir=tmp_path)
    pool.step(episodes("good"))
    pool.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_shutdown_ends_a_scorer_that_hangs_and_what_it_started(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("misbehaves"))
    pool.step(episodes("good"))
    (pid,) = processes(pool)
    pool._workers[0].process.send(episodes("an end while a child lives")[0])
    assert eventually(lambda: not is_running(pid))
    children = [each.pid for each in psutil.process_iter() if os.getpgid(each.pid) == pid and is_running(each.pid)]
    assert len(children) == 1
    pool.shutdown()
    assert eventually(lambda: not is_running(children[0]))


def test_a_scorer_whose_answer_nobody_reads_ends_without_a_word(
    make_pool: Callable[..., EnvironmentPool], tmp_path: Path
) -> None:
    """The driver that closes the connection then is told to it as a broken one."""
    pool = make_pool(*function("misbehaves"), run_dir=tmp_path)
    pool.step(episodes("good"))
    process = pool._workers[0].process
    process.send(episodes("good")[0])
    assert eventually(process.connection.poll)
    process.connection.close()
    assert process._process.wait(PATIENCE_S) == 0
    pool.shutdown()
    assert list(tmp_path.iterdir()) == []


DRIVER = f"""
import sys
from pathlib import Path
sys.path.append({HERE!r})
from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.pool import EnvironmentPool

arguments = dict(path="user_functions:misbehaves", params={{}}, search_path=[{HERE!r}])
pool = EnvironmentPool("env.function", "nemo_rl_offload.environments.function:FunctionEnvironment", Path(sys.argv[1]),
                       num_workers=2, timeout_s=None, memory_limit=None, **arguments)
pool.step([Episode({{}}, [dict(role="assistant", content="good")])] * 2)
print(*[worker.process._process.pid for worker in pool._workers], flush=True)
pool.step([Episode({{}}, [dict(role="assistant", content="a hang in C")])])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """One hangs where no alarm reaches it, the other waits."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=PROJECT_ROOT,
        start_new_session=True,
    )
    with driver, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(driver.kill)  # or a failed test would wait for it
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        processes = [psutil.Process(pid) for pid in pids]
        assert eventually(lambda: max(process.cpu_times().user for process in processes) > 1), "one hangs"
        os.killpg(driver.pid, number)
        assert driver.wait(PATIENCE_S) == -number
    assert eventually(lambda: not any(map(is_running, pids)))


def test_signals_to_all_processes_of_a_job_end_no_scorer(make_pool: Callable[..., EnvironmentPool]) -> None:
    """After them the driver finishes its step and saves."""
    pool = make_pool(*function("misbehaves"))
    pool.step(episodes("good"))
    before = processes(pool)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(before[0], number)
        time.sleep(0.05)
        assert pool.step(episodes("good")) == [RIGHT]
    assert processes(pool) == before


def test_a_step_that_was_interrupted_leaves_nothing_for_the_next(
    make_pool: Callable[..., EnvironmentPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(*function("misbehaves", "env.function.timeout_s=null"))
    pool.step(episodes("good"))
    monkeypatch.setattr(pool, "_hear", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pool.step(episodes("a hang in C"))
    monkeypatch.undo()
    assert pool.step(episodes("good")) == [RIGHT]


@pytest.mark.parametrize(
    ("scorer", "error", "words"),
    [
        ("pool_scorers:Refuses", ConfigError, r"^task: no such task$"),
        ("pool_scorers:RaisesAtStart", ConfigError, r"^KeyError: 'nothing' \(\S+pool_scorers.py:\d+\)$"),
        ("pool_scorers:ExitsAtStart", ConfigError, r"^SystemExit: 5 \("),
        (
            "pool_scorers:DiesAtStart",
            WorkerError,
            r"^env\.x: a scorer's process ended with code 7, 3 times in a row",
        ),
        ("pool_scorers:TwoScores", WorkerError, r"^TwoScores: returned 2 scores for one response\.$"),
        ("pool_scorers:NotFinite", WorkerError, r"^NotFinite: returned the reward nan, which must be finite\.$"),
        ("pool_scorers:NoText", WorkerError, r"^NoText: returned an observation that is neither text nor None\.$"),
        ("pool_scorers:GivesUp", WorkerError, r"^the judge has moved$"),
    ],
)
def test_what_ends_the_run(scorer: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    pool = EnvironmentPool("env.x", scorer, tmp_path / "log", num_workers=1, timeout_s=None, memory_limit=None)
    with pytest.raises(error, match=words):
        pool.step(episodes("x"))
    pool.shutdown()


def test_shutdown_while_another_thread_scores_starts_nothing_again(make_pool: Callable[..., EnvironmentPool]) -> None:
    pool = make_pool(*function("misbehaves", "env.function.timeout_s=3600"))
    pool.step(episodes("right"))
    (pid,) = processes(pool)
    raised: list[BaseException] = []

    def score() -> None:
        try:
            pool.step(episodes("a hang in C"))
        except WorkerError as error:
            raised.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.5)
    pool.shutdown()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "have been ended" in str(raised[0])
    assert processes(pool) == [pid]
    assert not is_running(pid)
