"""What every loop does around its steps: checkpoints, termination, skipped steps, restarts."""

import contextlib
import io
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakePolicy, Recorder

from nemo_rl_offload.algorithms import loop as loop_module
from nemo_rl_offload.algorithms.loop import Stopwatch, TrainingLoop, left_unmeasured, run_loop
from nemo_rl_offload.cluster.signals import Termination
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import CheckpointError, ConfigError, ResourceError, TrainingError, WorkerError
from nemo_rl_offload.runs.begin import checkpoints_of, find_checkpoint
from nemo_rl_offload.runs.origin import origin_of, write_origin

SMALL = ("sft.max_num_steps=6", "sft.val_period=0", "checkpointing.save_period=2", "checkpointing.keep_top_k=null")


class Counting:
    """Data that are numbers."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class Loop(TrainingLoop):
    validation_metric = "loss"
    before_step: Callable[[int], None] = staticmethod(lambda step: None)

    def update(self, watch: Stopwatch) -> tuple[dict[str, float], int]:
        self.before_step(self.step)
        assert isinstance(self.policy, FakePolicy)
        assert isinstance(self._data, Counting)
        self._data.position += 1
        self.policy.weight += 1
        skipped = float(self.policy.weight in self.policy.skipped)
        return {"loss": float(self._data.position), "skipped_updates": skipped}, 1

    def measure(self) -> dict[str, float]:
        return {"loss": 0.5}


def read_config(*overrides: str) -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml", [*SMALL, *overrides])


def make(run_dir: Path, *overrides: str) -> tuple[Loop, FakePolicy]:
    policy = FakePolicy()
    return Loop(read_config(*overrides), policy, Counting(), 6, run_dir), policy


def run(loop: Loop, termination: Termination | None = None) -> dict[tuple[int, str], dict[str, float]]:
    recorder: Any = Recorder()
    loop.run(recorder, recorder, termination or Termination(0))
    return recorder.logged  # type: ignore[no-any-return]


def saved(run_dir: Path) -> dict[int, int]:
    """Step and the weight in its checkpoint."""
    folders = run_dir.glob("checkpoints/step_*")
    return {int(path.name.removeprefix("step_")): int((path / "policy/weight").read_text()) for path in sorted(folders)}


@pytest.mark.parametrize("is_async", ["false", "true"])
def test_a_checkpoint_holds_the_step_it_was_begun_in(is_async: str, tmp_path: Path) -> None:
    loop, _ = make(tmp_path, f"checkpointing.is_async={is_async}")
    appeared: dict[int, set[int]] = {}
    loop.before_step = lambda step: appeared.update({step: set(saved(tmp_path))})
    run(loop)
    assert saved(tmp_path) == {2: 2, 4: 4, 6: 6}
    # In the background, the policy says after two more steps that it is done; the next checkpoint waits for the last.
    assert appeared[3] == (set() if is_async == "true" else {2})
    assert appeared[5] == ({2} if is_async == "true" else {2, 4})
    info = json.loads((tmp_path / "checkpoints/step_4/training_info.json").read_text())
    assert info["data"]["position"] == info["train"]["loss"] == 4


@pytest.mark.parametrize("stopped", [False, True])
def test_a_checkpoint_is_ranked_by_its_own_steps_validation(stopped: bool, tmp_path: Path) -> None:
    """It was ranked by the last validation, whose weights it has not: the newer took the place of the measured best."""
    validating = ("sft.val_period=4", "checkpointing.keep_top_k=1", "checkpointing.metric_name=val:loss")
    loop, _ = make(tmp_path, *validating, "checkpointing.higher_is_better=false", "checkpointing.save_period=2")
    losses = iter([0.3, 0.5, 0.9])  # at the start, at steps 4 and 6
    loop.measure = lambda: {"loss": next(losses)}  # type: ignore[method-assign]
    termination = Termination(25)

    def stop(step: int) -> None:
        termination.is_requested = stopped and step == 5

    loop.before_step = stop
    with pytest.raises(SystemExit) if stopped else contextlib.nullcontext():
        run(loop, termination)
    assert saved(tmp_path) == ({4: 4, 5: 5} if stopped else {4: 4, 6: 6})
    states = [
        json.loads((folder / "training_info.json").read_text()) for folder in (tmp_path / "checkpoints").iterdir()
    ]
    ranks = {state["step"]: state["metric"] for state in states}
    assert ranks == ({4: 0.5, 5: None} if stopped else {4: 0.5, 6: 0.9})


def test_a_goal_that_is_reached_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that the start's validation ended said nothing, and had no checkpoint."""
    for goal, said in ((0, "nothing is trained, and there is no checkpoint"), (3, "step 3 is the last")):
        (tmp_path / str(goal)).mkdir()
        loop, _ = make(tmp_path / str(goal))
        monkeypatch.setattr(Loop, "has_reached_goal", lambda self, goal=goal: self.step >= goal)
        recorder: Any = Recorder()
        loop.run(recorder, recorder, Termination(0))
        assert recorder.shown[-1] == f"sft.stop_at_validation_threshold is reached: {said}"
        assert set(saved(tmp_path / str(goal))) == ({2, 3} if goal else set())


def test_resuming_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    def stop(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    loop, _ = make(tmp_path, "checkpointing.is_async=true")
    loop.before_step = stop
    with pytest.raises(KeyboardInterrupt):
        run(loop)
    assert saved(tmp_path) == {2: 2}
    resumed, policy = make(tmp_path, "checkpointing.is_async=true")
    assert resumed.resume() == tmp_path / "checkpoints" / "step_2"
    logged = run(resumed)
    assert [logged[step, "train"]["loss"] for step in (3, 4, 5, 6)] == [3, 4, 5, 6]
    assert saved(tmp_path) == {2: 2, 4: 4, 6: 6}
    assert policy.weight == 6


@pytest.mark.parametrize("takes", ["everything", "weights"])
def test_a_run_begins_with_a_checkpoint_of_another(takes: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    run(make(first)[0])
    write_origin(second, origin_of(first / "checkpoints" / "step_4", takes))
    loop, policy = make(second)
    resumed = loop.resume()
    assert policy.weight == 4
    if takes == "everything":
        assert resumed == first / "checkpoints" / "step_4"
        assert policy.start_weight == 0, "a reference model is what it was in the first run"
    else:
        assert resumed is None
        assert policy.start_weight == 4
    assert loop.validation == {"first": None, "last": None}
    losses = [metrics["loss"] for (_, prefix), metrics in run(loop).items() if prefix == "train"]
    assert losses == ([5, 6] if takes == "everything" else [1, 2, 3, 4, 5, 6])
    assert saved(second) == ({6: 6} if takes == "everything" else {2: 6, 4: 8, 6: 10})
    again, policy = make(second)
    assert again.resume() == second / "checkpoints" / "step_6", "then from its own"
    assert policy.weight == (6 if takes == "everything" else 10)


def test_the_reference_model_has_the_start_weights_whenever_the_run_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    run(make(first)[0])
    write_origin(second, origin_of(first / "checkpoints" / "step_4", "weights"))
    run(make(second)[0])
    for algorithm, start_weight in (("sft", 0), ("dpo", 4)):
        loop, policy = make(second)
        loop.config["algorithm"] = algorithm
        loop.resume()
        assert (policy.weight, policy.start_weight) == (6, start_weight), "only where there is a reference model"


def test_damaged_weights_say_how_to_go_on(tmp_path: Path) -> None:
    run(make(tmp_path)[0])
    (tmp_path / "checkpoints/step_6/policy/weight").write_text("7")
    with pytest.raises(CheckpointError, match=r"weight is not what was written\. Remove .*step_6 to go on from step 4"):
        make(tmp_path)[0].resume()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as at a terminal, whatever starts the tests."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "patience_s"), [(signal.SIGTERM, 60.0), (signal.SIGINT, 0.01)])
def test_the_first_signal_saves_and_ends(number: int, patience_s: float, tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # which ends no patience after Ctrl-C

    loop, _ = make(tmp_path)
    loop.before_step = interrupt
    told: list[str] = []
    with pytest.raises(SystemExit) as caught, Termination(patience_s, told.append) as termination:
        run(loop, termination)
    assert caught.value.code == 143
    assert saved(tmp_path) == {2: 2, 3: 3}
    assert "when this step or validation is done, the run saves" in told.pop()
    assert not told


@pytest.mark.usefixtures("interruptible")
def test_a_signal_before_the_first_step_waits_for_none(tmp_path: Path) -> None:
    loop, _ = make(tmp_path, "sft.val_at_start=true")
    loop.measure = lambda: os.kill(os.getpid(), signal.SIGINT) or {"loss": 0.5}  # type: ignore[method-assign]
    with pytest.raises(SystemExit), Termination(60) as termination:
        run(loop, termination)
    assert loop.step == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, None])
def test_the_last_signal_ends_at_once(first: int, second: int | None, tmp_path: Path) -> None:
    """The second one, or the first where the run may take no time."""

    def interrupt(_step: int) -> None:
        os.kill(os.getpid(), first)
        if second is not None:
            os.kill(os.getpid(), second)
        pytest.fail("it went on")

    loop, _ = make(tmp_path)
    loop.before_step = interrupt
    error = KeyboardInterrupt if (second or first) == signal.SIGINT else SystemExit
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(error), Termination(60 if second else 0) as termination:
        run(loop, termination)
    assert saved(tmp_path) == {}
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_sigterm_ends_a_step_that_takes_too_long(tmp_path: Path) -> None:
    def terminate(_step: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    loop, _ = make(tmp_path)
    loop.before_step = terminate
    with pytest.raises(SystemExit) as caught, Termination(0.05) as termination:
        run(loop, termination)
    assert caught.value.code == 143
    assert saved(tmp_path) == {}
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.usefixtures("interruptible")
def test_what_is_ignored_in_the_background_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Termination(60) as termination:
        os.kill(os.getpid(), signal.SIGINT)
    assert not termination.is_requested


def test_rates_and_memory_of_a_step(tmp_path: Path) -> None:
    loop, policy = make(tmp_path)
    watch_train = loop.update

    def update(watch: Stopwatch) -> tuple[dict[str, float], int]:
        return watch.time("train", lambda: watch_train(watch))

    loop.update = update  # type: ignore[method-assign]
    metrics = loop.train_step()
    assert metrics["tokens_per_s_per_device"] == metrics["tokens_per_s"] / 2
    # 6e12 operations in the training phase on two devices, of which both together could do 1e15 a second.
    assert metrics["train_tflops_per_s_per_device"] == pytest.approx(3 / metrics["timing/train_s"])
    assert metrics["train_mfu"] == pytest.approx(6e-3 / metrics["timing/train_s"])
    assert (metrics["offloaded_bytes"], metrics["offload/peak_host_bytes"]) == (1000, 0)
    assert "memory/peak_device_bytes" not in metrics
    run(loop)
    assert policy.num_traces == 1
    trace = json.loads((tmp_path / "memory_trace.json").read_text())
    assert trace == {"step": 3, "samples": [{"seconds": 0.0, "used_bytes": 5, "offloaded_bytes": 3}]}


def test_chosen_steps_are_profiled_with_their_phases(tmp_path: Path) -> None:
    loop, policy = make(tmp_path, "logger.profile.steps=[2,5]", "logger.profile.all_ranks=true")
    plain = loop.update
    loop.update = lambda watch: watch.time("train", lambda: plain(watch))  # type: ignore[method-assign]
    before_ns = time.time_ns()
    run(loop)
    assert policy.profiled == [True, True]
    assert [path.relative_to(tmp_path) for path in policy.profiles] == [Path("profile/2"), Path("profile/5")]
    for ((name, begin_ns, end_ns),) in policy.profiles.values():
        assert name == "train"
        assert before_ns - 1e6 <= begin_ns <= end_ns <= time.time_ns() + 1e6
    loop, policy = make(tmp_path / "checkpoints", "logger.profile.steps=[1]")
    policy.cannot_write = ["Cannot write it: No space left on device."]
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    assert "warning: Cannot write it: No space left on device. The run goes on without it." in recorder.notes


def test_ray_is_started_or_a_cluster_joined(
    no_cluster: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for address, expected in ((None, "Starting Ray"), ("10.0.0.1:6379", "Joining the Ray cluster at RAY_ADDRESS=10")):
        if address:
            monkeypatch.setenv("RAY_ADDRESS", address)
        else:
            monkeypatch.delenv("RAY_ADDRESS", raising=False)
        run_loop(read_config(), tmp_path, said.append, io.StringIO(), lambda _: make(tmp_path)[0])
        assert said.pop(0).startswith(expected)
        said.clear()


def test_how_long_a_checkpoint_took_is_shown_where_that_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder: Any = Recorder()
    make(tmp_path)[0].run(recorder, recorder, Termination(0))
    assert not any("checkpoint" in line for line in recorder.shown)
    monkeypatch.setattr(loop_module, "WORTH_SAYING_S", 0.0)
    shown: Any = Recorder()
    make(tmp_path / "checkpoints")[0].run(shown, shown, Termination(0))
    told = [line.split(":")[0] for line in shown.shown if line.startswith("checkpoint")]
    assert told == [f"checkpoint of step {step}" for step in (2, 4, 6)]


def test_each_validation_says_what_it_measured(tmp_path: Path) -> None:
    shown: Any = Recorder()
    make(tmp_path)[0].run(shown, shown, Termination(0))
    found = [(step, metrics["loss"]) for (step, prefix), metrics in shown.logged.items() if prefix == "validation"]
    assert shown.shown == [f"validation at step {step}  loss {loss:.3g}" for step, loss in found]
    assert found


def test_warnings_of_the_workers_are_shown_and_kept(tmp_path: Path) -> None:
    loop, policy = make(tmp_path)
    policy.texts, policy.idle = ["no room"], ["core_attn"]

    def warn_again(step: int) -> None:
        policy.texts += ["still none"] * (step == 4)

    loop.before_step = warn_again
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    assert recorder.notes == ["warning: no room", "warning: core_attn after 1 steps", "warning: still none"]
    kept = (tmp_path / "warnings.log").read_text().splitlines()
    assert kept == [f"step {step}: {note}" for step, note in zip((0, 1, 4), recorder.notes, strict=True)]


def test_what_an_engine_does_not_count_is_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePolicy, "offload_stats", lambda self: defaultdict(lambda: None))
    loop, _ = make(tmp_path)
    assert not [name for name in loop.train_step() if "offload" in name]


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    loop, policy = make(tmp_path, "fault_tolerance.max_skipped_steps=2")
    policy.skipped = {1, 2, 4, 5}
    run(loop)
    assert loop.summary()["skipped_steps"] == 4
    assert set(saved(tmp_path)) == {4, 6}, "nothing to save before the first update"
    resumed, _ = make(tmp_path)
    resumed.resume()
    assert resumed.num_skipped == 4


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    loop, policy = make(tmp_path, "fault_tolerance.max_skipped_steps=2")
    policy.skipped = {3, 4, 5}
    message = (
        r"not finite in 3 steps in a row, .* step 5\. The weights have not changed since step 2\. Lower .*optimizer.lr"
    )
    with pytest.raises(TrainingError, match=message):
        run(loop)
    assert loop.step == 5


@pytest.mark.parametrize("name", ["warnings.log", "memory_trace.json"])
def test_what_a_run_can_do_without_ends_no_run(name: str, tmp_path: Path) -> None:
    loop, policy = make(tmp_path)
    (tmp_path / name).mkdir()
    loop.before_step = lambda step: policy.texts.append(f"text {step}")
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    (note,) = [note for note in recorder.notes if name in note]
    assert "it is a folder, and no plain file" in note
    assert [note for note in recorder.notes if "text" in note] == [f"warning: text {step}" for step in range(1, 7)]
    assert set(saved(tmp_path)) == {2, 4, 6}


def test_a_damaged_older_checkpoint_is_told_once_and_kept(tmp_path: Path) -> None:
    loop, _ = make(tmp_path, "checkpointing.keep_top_k=1", "checkpointing.save_period=1")

    def damage(step: int) -> None:
        if step == 2:
            (tmp_path / "checkpoints/step_1/training_info.json").write_text("[]")

    loop.before_step = damage
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    (note,) = recorder.notes
    assert note.startswith(f"warning: {tmp_path}/checkpoints/step_1 is kept: training_info.json cannot be read")
    assert f"step 2: {note}\n" == (tmp_path / "warnings.log").read_text()
    assert (tmp_path / "checkpoints/step_1").exists()
    assert len(saved(tmp_path)) <= 3


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("at_step", [1, 3, 6])
def test_a_run_directory_that_is_gone_ends_the_run(replaced: bool, at_step: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    loop, _ = make(run_dir)

    def remove(step: int) -> None:
        if step == at_step:
            run_dir.rename(tmp_path / "elsewhere")
            if replaced:
                run_dir.mkdir()

    loop.before_step = remove
    with pytest.raises(
        ResourceError, match="the run directory was removed, moved or replaced while the run was at work"
    ):
        run(loop)
    assert loop.step == at_step
    assert list(run_dir.iterdir()) == [] if replaced else not run_dir.exists()


@pytest.mark.parametrize(("wanted", "told"), [("true", ""), ("false", " (without the optimizer's state)")])
def test_a_checkpoint_says_whether_it_has_the_optimizer(wanted: str, told: str, tmp_path: Path) -> None:
    loop, policy = make(tmp_path, f"checkpointing.save_optimizer={wanted}")
    asked: list[bool] = []

    def note(folder: Path, **how: bool) -> None:
        asked.append(how["with_optimizer"])
        FakePolicy.start_checkpoint(policy, folder, **how)

    policy.start_checkpoint = note  # type: ignore[method-assign]
    loop.step = 3
    loop.save()
    assert asked == [wanted == "true"]
    assert checkpoints_of(tmp_path) == f"step_3{told}"
    with pytest.raises(CheckpointError, match=re.escape(f"is a run, with step_3{told}. Give one of them")):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("is_async", ["false", "true"])
def test_a_run_directory_that_goes_during_a_save_ends_the_run(is_async: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    loop, policy = make(run_dir, f"checkpointing.is_async={is_async}")

    def leave(folder: Path, **how: bool) -> None:
        FakePolicy.start_checkpoint(policy, folder, **how)
        run_dir.rename(tmp_path / "elsewhere")

    policy.start_checkpoint = leave  # type: ignore[method-assign]
    with pytest.raises(
        ResourceError, match="the run directory was removed, moved or replaced while the run was at work"
    ):
        run(loop)
    assert not run_dir.exists()


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what happened to clusters."""
    events: list[str] = []

    @contextmanager
    def cluster(**_: Any) -> Iterator[SimpleNamespace]:
        events.append("up")
        try:
            yield SimpleNamespace(world_size=1, device="cpu", is_private=True, renew=lambda: events.append("renewed"))
        finally:
            events.append("down")

    monkeypatch.setattr(loop_module, "VirtualCluster", cluster)
    return events


def fail_at(loop: Loop, steps: list[int], error: Exception) -> Loop:
    """Let the loop fail in the next of these steps."""

    def fail(step: int) -> None:
        if steps and step == steps[0]:
            steps.pop(0)
            raise error

    loop.before_step = fail
    return loop


def test_a_failed_worker_restarts_all_from_the_last_checkpoint(no_cluster: list[str], tmp_path: Path) -> None:
    steps, data, said = [1, 4, 5], Counting(), list[str]()
    config = read_config("fault_tolerance.max_restarts=3")
    config["logger"]["tensorboard_enabled"] = False
    policies: list[FakePolicy] = []

    def build(_: Any) -> Loop:
        policies.append(FakePolicy())
        return fail_at(Loop(config, policies[-1], data, 6, tmp_path), steps, WorkerError("rank 0 of 1: it died"))

    summary = run_loop(config, tmp_path, said.append, None, build)
    assert (summary["steps"], summary["restarts"]) == (6, 3)
    assert no_cluster == ["up", "renewed", "renewed", "renewed", "down"]
    assert policies[-1].weight == data.position == 6
    assert policies[-1].offload_stats()["bytes_out"] == 2000, "since its checkpoint"
    assert summary["offload"]["bytes_out"] == 6000
    assert saved(tmp_path) == {2: 2, 4: 4, 6: 6}
    assert [line for line in said if "Restarting" in line][-1].startswith("rank 0 of 1: it died\n")
    assert "Restarting the workers (3 of 3)" in said[-4]
    assert said[-1] == "Of that time: imports 2.5 s.", "of parts that took a second"
    assert summary["start_seconds"].keys() == {"imports", "weights", "loading", "checkpoint"}
    assert (tmp_path / "restarts.log").read_text().count("it died") == 3
    losses = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [(record["step"], record["metrics"]["loss"]) for record in losses if record["prefix"] == "train"]
    assert trained == [(step, step) for step in (1, 2, 3, 3, 4, 5, 6)]


def test_restarts_add_no_time_twice(no_cluster: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten seconds a step, begun ones included: 1, 1, 2, 3, 4, 3, 4, 5, 6; the first time there is no checkpoint."""
    now, steps, data = [0.0], [1, 4], Counting()
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])
    config = read_config("fault_tolerance.max_restarts=2")
    config["logger"]["tensorboard_enabled"] = False

    def build(_: Any) -> Loop:
        loop = fail_at(Loop(config, FakePolicy(), data, 6, tmp_path), steps, WorkerError("it died"))
        fail = loop.before_step

        def take_ten_seconds(step: int) -> None:
            now[0] += 10
            fail(step)

        loop.before_step = take_ten_seconds
        return loop

    assert run_loop(config, tmp_path, lambda _: None, None, build)["wall_seconds"] == 90


@pytest.mark.parametrize(
    ("error", "restarts"), [(WorkerError("again"), 1), (ConfigError("not again"), 0), (TrainingError("not again"), 0)]
)
def test_what_is_not_restarted(error: Exception, restarts: int, no_cluster: list[str], tmp_path: Path) -> None:
    config = read_config("fault_tolerance.max_restarts=1")

    def build(_: Any) -> Loop:
        return fail_at(Loop(config, FakePolicy(), Counting(), 6, tmp_path), [1], error)

    with pytest.raises(type(error), match="again"):
        run_loop(config, tmp_path, lambda _: None, None, build)
    assert no_cluster == ["up", *["renewed"] * restarts, "down"]
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("when", ["loading", "restarting", "training"])
def test_whole_runs_whose_directory_is_gone(when: str, replaced: bool, no_cluster: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = read_config("fault_tolerance.max_restarts=1")
    config["logger"]["tensorboard_enabled"] = False

    def remove() -> None:
        run_dir.rename(tmp_path / "elsewhere")
        if replaced:
            (run_dir / "checkpoints" / ".step_9.partial").mkdir(parents=True)

    def fail(step: int) -> None:
        remove()
        if when == "restarting":
            raise WorkerError("it died")

    def build(_: Any) -> Loop:
        loop = Loop(config, FakePolicy(), Counting(), 6, run_dir)
        loop.before_step = fail
        if when == "loading":
            loop.before_step = lambda step: pytest.fail("trains")
            remove()
        return loop

    with pytest.raises(ResourceError, match="the run directory was removed, moved or replaced"):
        run_loop(config, run_dir, lambda _: None, None, build)
    assert no_cluster == ["up", "down"]
    left = [str(path.relative_to(tmp_path)) for path in run_dir.rglob("*")]
    assert left == (["run/checkpoints", "run/checkpoints/.step_9.partial"] if replaced else [])


def test_a_log_of_restarts_that_cannot_be_written_ends_no_run(no_cluster: list[str], tmp_path: Path) -> None:
    config, said, steps = read_config("fault_tolerance.max_restarts=1"), list[str](), [3]
    config["logger"]["tensorboard_enabled"] = False
    (tmp_path / "restarts.log").mkdir()

    def build(_: Any) -> Loop:
        return fail_at(Loop(config, FakePolicy(), Counting(), 6, tmp_path), steps, WorkerError("it died"))

    assert run_loop(config, tmp_path, said.append, None, build)["restarts"] == 1
    assert sum("restarts.log: cannot be written" in line for line in said) == 1


def test_what_was_saved_by_half_is_removed_when_a_run_ends(no_cluster: list[str], tmp_path: Path) -> None:
    """A checkpoint in the background is neither waited for nor left behind by an interruption."""
    config = read_config("checkpointing.is_async=true")
    config["logger"]["tensorboard_enabled"] = False

    def interrupt(step: int) -> None:
        if step == 3:
            assert list(tmp_path.glob("checkpoints/.step_2.partial"))
            raise KeyboardInterrupt

    def build(_: Any) -> Loop:
        loop = Loop(config, FakePolicy(), Counting(), 6, tmp_path)
        loop.before_step = interrupt
        return loop

    with pytest.raises(KeyboardInterrupt):
        run_loop(config, tmp_path, lambda _: None, None, build)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_clocks_that_jump_change_no_duration(
    no_cluster: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's clock is set back and forth by years; only what a record says of the time of day may follow."""
    days, real = iter([0, -9000, 9000, -1, 1] * 1000), time.time
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + 86400 * next(days)))
    config, output = read_config(), io.StringIO()
    loops: list[Loop] = []

    def build(_: Any) -> Loop:
        loops.append(Loop(config, FakePolicy(), Counting(), 6, tmp_path))
        return loops[-1]

    before_s = time.monotonic()
    summary = run_loop(config, tmp_path, lambda _: None, output, build)
    took_s = time.monotonic() - before_s
    assert 0 < summary["wall_seconds"] <= took_s
    lines = [line for line in output.getvalue().splitlines() if line.startswith("step")]
    assert len(lines) == 2
    assert all(" 0:00:0" in line for line in lines)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert min(record["time"] for record in records) < max(record["time"] for record in records) - 86400 * 365
    for record in records:
        for name, value in record["metrics"].items():
            if "timing/" in name:
                assert 0 <= value <= took_s, name
            if "per_s" in name:
                assert value >= 1 / took_s, name
    assert Loop(config, FakePolicy(), Counting(), 6, tmp_path).resume() == tmp_path / "checkpoints" / "step_6"


def test_checkpoints_go_by_their_step_and_not_by_their_time(tmp_path: Path) -> None:
    run(make(tmp_path)[0])
    for step, seconds in ((2, 3e9), (4, 1e9), (6, 0)):
        os.utime(tmp_path / "checkpoints" / f"step_{step}", (seconds, seconds))
    assert make(tmp_path)[0].resume() == tmp_path / "checkpoints" / "step_6"


@pytest.mark.parametrize(("num", "further", "is_said"), [(5, [], False), (4, [{}], False), (5, [{}], True)])
def test_sets_that_no_validation_reaches_are_told(num: int, further: list[Any], is_said: bool) -> None:
    config = read_config("sft.max_val_samples=4")
    config["data"]["validation"]["further"] = further
    told = left_unmeasured(config | {"algorithm": "sft"}, num)
    assert bool(told) == is_said
    assert not told or told[0].startswith("sft.max_val_samples: the first 4 of 5 validation samples are measured")
