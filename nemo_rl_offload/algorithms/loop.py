"""What every algorithm's loop shares: steps, validation, checkpoints, resuming, and the run around it."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TextIO, get_args

from nemo_rl_offload.algorithms.run_totals import Elapsed, run_totals
from nemo_rl_offload.algorithms.waiting import WORTH_SAYING_S, start_of_ray, waiting
from nemo_rl_offload.cluster.signals import EXIT_CODE, Termination
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_rl_offload.config.schema import DistillationConfig, DPOConfig, GRPOConfig, MasterConfig, SFTConfig
from nemo_rl_offload.errors import CheckpointError, ResourceError, TrainingError, WorkerError
from nemo_rl_offload.observability.logger import MetricLogger
from nemo_rl_offload.observability.progress import Progress, described
from nemo_rl_offload.observability.start_clock import StartClock, told
from nemo_rl_offload.observability.step_profile import since_1970
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.runs.origin import read_origin
from nemo_rl_offload.runs.output import OptionalLog, RunFolder, write_json_atomic
from nemo_rl_offload.runs.run_directory import (
    MEMORY_FILE,
    POLICY,
    PROFILE,
    RESTARTS_FILE,
    SUMMARY_FILE,
    WARNINGS_FILE,
    Checkpoints,
    loop_state,
    read_checkpoint,
    recovery_hint,
    remove_unfinished,
)
from nemo_rl_offload.runs.run_files import (
    LoopState,
    LoopSummary,
    MemoryOfStep,
    OffloadTotals,
    RunTotals,
    Summary,
    Validation,
)
from nemo_rl_offload.units import human_duration, parse_duration

Say = Callable[[str], None]
TRACED_STEP = 2
"""Steps after the first of a run to the one whose memory is traced: buffers stand, and speed is the usual one."""
FIRST_STEP_S = 10.0
"""From which on it is said how long the first step was."""
NODES_S = 5.0
"""From which on it is said how long nodes were waited for."""
OffloadCounter = Literal[
    "bytes_in",
    "denied_bytes",
    "kept_bytes",
    "ineffective_bytes",
    "returned_bytes",
    "demand_reloads",
    "stall_out_ms",
    "stall_in_ms",
]
OFFLOAD_COUNTERS: tuple[OffloadCounter, ...] = get_args(OffloadCounter)
AT_START = {"epoch": 0, "position": 0}
"""The state of a data stream that nothing was read from."""


class DataStream(Protocol):
    """Training data whose place can be saved."""

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...


def left_unmeasured(config: MasterConfig, num_samples: int) -> list[str]:
    """A warning where several sets are validated and `max_val_samples` takes the first of them alone."""
    section, data = section_of(config), config["data"]
    most, key = section["max_val_samples"], f"{config['algorithm']}.max_val_samples"
    drawn = [each for each in (data["train"], *data["train"]["further"]) if each["split_validation_size"]]
    is_measured = section["val_period"] or section["val_at_start"] or section["val_at_end"]
    if num_samples <= most or not is_measured or not (data["validation"]["further"] or len(drawn) > 1):
        return []
    return [
        f"{key}: the first {most} of {num_samples} validation samples are measured, in the order of their sets. For "
        f"all: {key}={num_samples}"
    ]


def section_of(config: MasterConfig) -> GRPOConfig | SFTConfig | DPOConfig | DistillationConfig:
    """The section of the algorithm that `config` is for; a plugin's has the keys that all of these share."""
    sections: Mapping[str, Any] = config
    return sections[config["algorithm"]]  # type: ignore[no-any-return]


def spec_of(config: MasterConfig) -> AlgorithmSpec:
    """The algorithm that `config` is for."""
    return ALGORITHMS[config["algorithm"]]


def loss_of(config: MasterConfig) -> tuple[str, Mapping[str, object]]:
    """The algorithm's loss, and the section that it takes its keys from."""
    spec = spec_of(config)
    return spec.loss, config["loss_fn"] if spec.loss_fn_keys else section_of(config)


class TrainingLoop(ABC):
    """Steps until `num_steps`, with validation and checkpoints as configured.

    A subclass says what a step does (`update`) and what validation measures (`measure`); `validation_metric` is the
    figure that a run is judged by, and `progress_metrics` are shown on the way.
    """

    validation_metric: str
    progress_metrics: ClassVar[tuple[str, ...]] = ("loss", "tokens_per_s", "offloaded_bytes")

    def __init__(
        self, config: MasterConfig, policy: PolicyInterface, data: DataStream, num_steps: int, run_dir: Path
    ) -> None:
        self.config = config
        self.policy = policy
        self.num_steps = num_steps
        self._data = data
        self._section = section_of(config)
        self.loss = loss_of(config)
        saving = config["checkpointing"]
        self._run_dir = run_dir
        self.folder = RunFolder(run_dir)
        self._warnings = OptionalLog(run_dir / WARNINGS_FILE)
        self._peak_flops_per_s = policy.peak_flops_per_s()
        self._checkpoints = Checkpoints(run_dir, saving["keep_top_k"], saving["higher_is_better"])
        self._pending: tuple[int, LoopState, float | None] | None = None
        self.seed = self._section["seed"]
        self.step = self.num_skipped = self._num_skipped_in_a_row = 0
        self.validation: Validation = {"first": None, "last": None}
        self._num_validations = 0
        self.train_metrics: dict[str, float] = {}
        self._validation_metrics: dict[str, float] = {}
        self._validated_step: int | None = None
        self._first_validation_metrics: dict[str, float] = {}
        self._totals_before: RunTotals | None = None
        self.elapsed = Elapsed()
        self._phase_seconds = Counter[str]()
        self.start_seconds: dict[str, float] = {}
        """What building the workers took, by part, and all of the loading."""
        self._watch = Stopwatch()
        self.progress: Progress | None = None
        """Of the run, while there is one."""

    @abstractmethod
    def update(self, watch: "Stopwatch") -> tuple[dict[str, float], int]:
        """Train on the next data; returns metrics and the number of tokens."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Validate; returns metrics, `validation_metric` among them."""

    def resume(self) -> Path | None:
        """Go on from the run directory's latest checkpoint, or begin where the run's origin says; returns the folder of
        the checkpoint whose step is gone on from, None without one.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        latest, origin = self._checkpoints.latest(), read_origin(self._run_dir)
        start = origin and origin["start_weights"]
        if start and (latest is None or spec_of(self.config).keeps_reference(self.config)):
            begins_with = read_checkpoint(Path(start))
            self.policy.load_start_weights(begins_with.folder / POLICY, begins_with.policy_files)
        is_own = latest is not None
        if latest is None and origin is not None and origin["takes"] == "everything":
            latest = read_checkpoint(Path(origin["checkpoint"]))
        if latest is None:
            self.elapsed.go_on_from(0.0)
            self._data.load_state_dict(AT_START)  # the workers were restarted, the data may have been read before
            return None
        folder, state = latest.folder, loop_state(latest)
        try:
            self.policy.load_checkpoint(folder / POLICY, latest.policy_files)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {recovery_hint(folder) if is_own else ''}".rstrip()) from error
        self._data.load_state_dict(state["data"])
        self.step, self.train_metrics = state["step"], state["train"]
        self.validation_metric = state.get("validation_metric", self.validation_metric)
        if not is_own:  # time, counts and validations are of the other run
            self.elapsed.go_on_from(0.0)
            return folder
        self.validation, self._validation_metrics = state["validation"], state["validation_metrics"]
        self._first_validation_metrics = state.get("first_validation_metrics", {})
        self._num_validations = state.get("num_validations", 2)  # of older ones, which show the first and the last
        self.num_skipped = state["num_skipped"]
        self._totals_before = state.get("totals")
        self.elapsed.go_on_from(state.get("wall_seconds", 0.0))
        return folder

    def run(self, logger: MetricLogger, progress: Progress, termination: Termination) -> None:
        """Train to the last step.

        Raises:
            TrainingError: too many steps in a row had to be skipped.
            SystemExit: of `termination`, after a checkpoint.
        """
        section, saving = self._section, self.config["checkpointing"]
        self.progress = progress
        epochs, name = section["max_num_epochs"], self.config["algorithm"]
        if epochs and self.num_steps < (most := int(section["max_num_steps"])):
            progress.show(
                f"This run ends by step {self.num_steps}, for {name}.max_num_epochs is {epochs}, and not with "
                f"{name}.max_num_steps {most}. For all of those: {name}.max_num_epochs=null"
            )
        if section["val_at_start"] and self.step == 0:
            self._validate(logger, progress)
        self._warn(self.notices(), progress)
        if termination.is_requested:  # all that was trained is saved
            sys.exit(EXIT_CODE)
        first_step, deadline = self.step + 1, Deadline(saving["checkpoint_must_save_by"], self.elapsed)
        while not self.has_taken_all() and not self.has_reached_goal():
            self.step += 1
            deadline.step_begins()
            self._take_step(progress, self.step - first_step)
            logger.log(self.train_metrics, self.step, "train")
            progress.update(self.step, **{name: self.train_metrics.get(name) for name in self.progress_metrics})
            self._warn([*self.notices(), *(self.policy.idle_modules() if self.step == first_step else [])], progress)
            self._warn([*logger.notices(), *self.keep_samples()], progress)
            self._watch_skipped()
            at_end = self.has_taken_all()
            if (section["val_at_end"] and at_end) or (section["val_period"] and self.step % section["val_period"] == 0):
                self._validate(logger, progress)
            at_end = at_end or self.has_reached_goal()
            if is_late := not at_end and deadline.is_before_next_step():
                progress.note("checkpointing.checkpoint_must_save_by: the run ends after this step's checkpoint")
            ends_early = is_late or (termination.is_requested and not at_end)
            is_due = at_end or ends_early or self.step % saving["save_period"] == 0
            # An optimizer that has never taken a step has no state, which Megatron cannot load again.
            with self.folder.written_to():
                if saving["enabled"] and is_due and self.num_skipped < self.step:
                    deadline.save_begins()
                    self.save()
                    deadline.save_ends()
                if self._pending and (at_end or ends_early or self.policy.checkpoint_is_written()):
                    self._finish_save()
            self._warn(self._checkpoints.notices(), progress)
            if ends_early:
                sys.exit(EXIT_CODE)
        if self.step < self.num_steps and self.has_taken_all():
            progress.show(
                f"{name}.max_num_epochs {epochs}: all passes are made with step {self.step}, which is the last"
            )
        if self.has_reached_goal():
            what = f"step {self.step} is the last" if self.step else "nothing is trained, and there is no checkpoint"
            progress.show(f"{name}.stop_at_validation_threshold is reached: {what}")
        self.folder.check()
        logger.close()
        self._warn([*self.notices(), *logger.notices()], progress)

    def _take_step(self, progress: Progress, num_before: int) -> None:
        """Take a step, traced or profiled where it is to be, after so many others of this process."""
        is_traced = num_before == TRACED_STEP
        if is_traced:
            self.policy.start_memory_trace()
        if is_profiled := self.step in self.config["logger"]["profile"]["steps"]:
            self.policy.start_profile(all_ranks=self.config["logger"]["profile"]["all_ranks"])
        first = "The first step (a GPU's kernels are compiled in it)"
        with nullcontext() if num_before else waiting(progress.show, first, begins=False, worth_saying_s=FIRST_STEP_S):
            self.train_metrics = self.train_step()
        self.folder.check()
        if is_profiled:
            self._warn(self._keep_profile(progress), progress)
        if is_traced:
            self._warn(self._keep_trace(), progress)

    def ranked_by(self) -> str | None:
        """The metric by which checkpoints are ranked; None where the latest are kept."""
        return self.config["checkpointing"]["metric_name"]

    def has_taken_all(self) -> bool:
        """Whether the run has all its steps, or all passes over its data."""
        return self.step >= self.num_steps

    def has_reached_goal(self) -> bool:
        """Whether the last validation was as good as the run is to become."""
        return False

    def notices(self) -> list[str]:
        """What the workers have warned of since the last call."""
        return self.policy.notices()

    def keep_samples(self) -> list[str]:
        """Write down responses of the step or the validation that has ended; returns what to warn of."""
        return []

    def samples_to_show(self) -> list[str]:
        """Lines with responses of the validation that has ended, where there are any."""
        return []

    def _validate(self, logger: MetricLogger, progress: Progress) -> None:
        self.validate(logger)
        self.folder.check()
        names = (self.validation_metric, *self.progress_metrics)
        measured = {name: value for name in names if (value := self._validation_metrics.get(name)) is not None}
        progress.show("  ".join([f"validation at step {self.step}", *described(measured)]))
        self._warn(self.keep_samples(), progress)
        for line in self.samples_to_show():
            progress.show(line)

    def _warn(self, texts: Sequence[str], progress: Progress) -> None:
        if texts:
            text = "".join(f"step {self.step}: warning: {text}\n" for text in texts)
            for line in (*texts, *self._warnings.append(text)):
                progress.note(f"warning: {line}")

    def _keep_profile(self, progress: Progress) -> list[str]:
        """Write what was recorded of this step; returns what to warn of."""
        folder = self._run_dir / PROFILE
        if failed := self.policy.finish_profile(folder, self.step, since_1970(self._watch.spans)):
            return [f"{each} The run goes on without it." for each in failed]
        progress.show(f"profile of step {self.step}: {folder}/step_{self.step}_rank_*.json.gz, for ui.perfetto.dev")
        return []

    def _keep_trace(self) -> list[str]:
        """Write what was sampled of this step's memory; returns what to warn of."""
        trace: MemoryOfStep = {"step": self.step, "samples": self.policy.finish_memory_trace()}
        try:
            write_json_atomic(self._run_dir / MEMORY_FILE, trace)
        except ResourceError as error:
            return [f"{error} The run goes on without it."]
        return []

    def _watch_skipped(self) -> None:
        """Count steps of which every update was skipped, and end a run that has too many of them in a row."""
        was_skipped = self.train_metrics.get("skipped_updates", 0.0) == 1
        self.num_skipped += was_skipped
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if was_skipped else 0
        if self._num_skipped_in_a_row > (allowed := self.config["fault_tolerance"]["max_skipped_steps"]):
            raise TrainingError(
                f"The loss or a gradient was not finite in {allowed + 1} steps in a row, the last of them step "
                f"{self.step}. The weights have not changed since step {self.step - allowed - 1}. Lower "
                "policy.megatron_cfg.optimizer.lr, or look for a bad sample; fault_tolerance.max_skipped_steps skips "
                "more."
            )

    def train_step(self) -> dict[str, float]:
        """One step; returns its metrics: the algorithm's, rates, timings, memory and what was offloaded."""
        watch = self._watch = Stopwatch()
        before, flops_before = self.policy.offload_stats(), self.policy.trained_flops()
        metrics, num_tokens = self.update(watch)
        self._phase_seconds.update(watch.phases_s)
        tokens_per_s = num_tokens / watch.total_s
        return {
            **metrics,
            "num_tokens": float(num_tokens),
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / self.policy.world_size,
            **self._utilization(flops_before, watch.seconds("train")),
            **self._memory(before),
            **watch.metrics(),
        }

    def _utilization(self, flops_before: float | None, seconds: float) -> dict[str, float]:
        """Of the training phase: the rate of a device, and the share of what all could do, where that is known."""
        flops = self.policy.trained_flops()
        if flops is None or flops_before is None or not seconds:
            return {}
        rate = (flops - flops_before) / seconds
        metrics = {"train_tflops_per_s_per_device": rate / 1e12 / self.policy.world_size}
        return metrics if self._peak_flops_per_s is None else metrics | {"train_mfu": rate / self._peak_flops_per_s}

    def _memory(self, before: OffloadTotals) -> dict[str, float]:
        after, memory = self.policy.offload_stats(), self.policy.memory()
        metrics: dict[str, float] = {}  # none of what is not counted
        if (bytes_out := after["bytes_out"]) is not None:
            metrics["offloaded_bytes"] = float(bytes_out - (before["bytes_out"] or 0))
        for name in OFFLOAD_COUNTERS:
            if (count := after[name]) is not None:
                metrics[f"offload/{name}"] = float(count - (before[name] or 0))
        if after["peak_host_bytes"] is not None:
            metrics["offload/peak_host_bytes"] = float(after["peak_host_bytes"])
        for phase, peak_bytes in memory.get("peak_device_bytes_by_phase", {}).items():
            metrics[f"memory/peak_device_bytes/{phase}"] = float(peak_bytes)
        for what, resident_bytes in memory.get("device_bytes", {}).items():
            metrics[f"memory/device_bytes/{what}"] = float(resident_bytes)
        for what, host_bytes in memory.get("host_bytes", {}).items():
            metrics[f"memory/host_bytes/{what}"] = float(host_bytes)
        device_bytes = memory["peak_device_bytes"]
        return metrics if device_bytes is None else metrics | {"memory/peak_device_bytes": float(device_bytes)}

    def validate(self, logger: MetricLogger) -> None:
        """Measure and log."""
        self._validation_metrics, self._validated_step = self.measure(), self.step
        logger.log(self._validation_metrics, self.step, "validation")
        value = self._validation_metrics[self.validation_metric]
        if self.validation["first"] is None:
            self._first_validation_metrics = self._validation_metrics
        first = self._first_validation_metrics.get(self.validation_metric, self.validation["first"])
        self.validation = {"first": first, "last": value}
        self._num_validations += 1

    def save(self) -> None:
        """Write a checkpoint of this step, or begin to (`checkpointing.is_async`)."""
        self._finish_save()
        prefix, _, name = (self.ranked_by() or "").partition(":")
        metrics = self.train_metrics
        if prefix == "val":  # of other steps, it says nothing of these weights
            metrics = self._validation_metrics if self._validated_step == self.step else {}
        state: LoopState = {
            "data": self._data.state_dict(),
            "validation": self.validation.copy(),
            "num_validations": self._num_validations,
            "train": self.train_metrics,
            "validation_metrics": self._validation_metrics,
            "first_validation_metrics": self._first_validation_metrics,
            "validation_metric": self.validation_metric,
            "num_skipped": self.num_skipped,
            "totals": run_totals(self.policy, self._totals_before, self._phase_seconds),
            "wall_seconds": self.elapsed.seconds,
            "has_optimizer": self.config["checkpointing"]["save_optimizer"],
        }
        in_background, start_s = self.config["checkpointing"]["is_async"], time.perf_counter()
        how = {"in_background": in_background, "with_optimizer": state["has_optimizer"]}
        self._checkpoints.begin(self.step, lambda folder: self.policy.start_checkpoint(folder, **how))
        self._pending = (self.step, state, metrics.get(name))
        if not in_background:
            self._finish_save()
            if self.progress is not None and (seconds := time.perf_counter() - start_s) >= WORTH_SAYING_S:
                self.progress.show(f"checkpoint of step {self.step}: written in {human_duration(seconds)}")

    def _finish_save(self) -> None:
        if self._pending is not None:
            step, state, metric = self._pending
            self._pending = None
            self._checkpoints.commit(step, state, metric, self.policy.finish_checkpoint)

    def close(self) -> None:
        """End the workers."""
        self.policy.shutdown()

    def let_go(self) -> None:
        """End at once what does not go with the cluster, where a run fails: nothing, of most loops."""
        return

    def summary(self) -> LoopSummary:
        """What the loop itself knows of a finished run, of which others may have run a part."""
        totals = run_totals(self.policy, self._totals_before, self._phase_seconds)
        return {
            "algorithm": self.config["algorithm"],
            "steps": self.step,
            "seed": self.seed,
            "skipped_steps": self.num_skipped,
            "validation_metric": self.validation_metric,
            "validation": self.validation,
            "num_validations": self._num_validations,
            "train": {"loss": self.train_metrics.get("loss")},
            "offload": totals["offload"],
            "paged_stash": totals["paged_stash"],
            "memory": totals["memory"],
            "phase_seconds": totals.get("phase_seconds", {}),
            "start_seconds": self.start_seconds,
            "wall_seconds": self.elapsed.seconds,
        }


class Deadline:
    """When a run has to end, `must_save_by` (`units.parse_duration`) after the start of its process; None: never."""

    def __init__(self, must_save_by: str | None, elapsed: Elapsed) -> None:
        self._must_save_by_s = math.inf if must_save_by is None else parse_duration(must_save_by)
        self._elapsed = elapsed
        self._begins_s: list[float] = []
        self._save_begins_s = self._save_s = 0.0

    def save_begins(self) -> None:
        """A checkpoint begins."""
        self._save_begins_s = self._elapsed.of_this_process_s

    def save_ends(self) -> None:
        """It is written, or being written beside the next step."""
        self._save_s = self._elapsed.of_this_process_s - self._save_begins_s

    def step_begins(self) -> None:
        """A step begins."""
        self._begins_s.append(self._elapsed.of_this_process_s)

    def is_before_next_step(self) -> bool:
        """Whether another step of average length, and a checkpoint as the last, would end too late."""
        now_s = self._elapsed.of_this_process_s
        return now_s + (now_s - self._begins_s[0]) / len(self._begins_s) + self._save_s >= self._must_save_by_s


class Stopwatch:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._phases_s: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Each phase with its begin and end, by `time.perf_counter`."""

    def time[T](self, phase: str, work: Callable[[], T]) -> T:
        """Run `work` and note how long it took, added to what the phase took before."""
        start_s = time.perf_counter()
        result = work()
        end_s = time.perf_counter()
        self._phases_s[phase] = self._phases_s.get(phase, 0.0) + end_s - start_s
        self.spans.append((phase, start_s, end_s))
        return result

    @property
    def phases_s(self) -> Mapping[str, float]:
        """Seconds of each phase so far."""
        return self._phases_s

    def seconds(self, phase: str) -> float:
        """Seconds of a phase so far."""
        return self._phases_s.get(phase, 0.0)

    @property
    def total_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start_s

    def metrics(self) -> dict[str, float]:
        """`timing/<phase>_s` of every phase, and of the whole step."""
        return {f"timing/{phase}_s": seconds for phase, seconds in {**self._phases_s, "step": self.total_s}.items()}


def run_loop(
    config: MasterConfig,
    run_dir: Path,
    say: Say,
    progress_stream: TextIO | None,
    build: Callable[[VirtualCluster], TrainingLoop],
    groups_per_slot: int = 1,
) -> Summary:
    """Start Ray, build the loop there, resume it, run it; everything it writes lands in `run_dir`.

    When a worker or its node fails, all workers are started again, up to `fault_tolerance.max_restarts` times, on nodes
    that are alive: one that comes back would have lost its process groups with the others anyway. A process of Ray
    that was started here counts as well, and Ray is then started anew.

    `say` shows one line of status to the user; progress goes to `progress_stream`, or to standard output.
    `groups_per_slot` worker groups share each slot of the cluster. Returns the summary, also written to `run_dir`.
    Raises a NemoRLOffloadError for everything that a user can mend.
    """
    elapsed, folder, restarts = Elapsed(), RunFolder(run_dir), OptionalLog(run_dir / RESTARTS_FILE)
    allowed = config["fault_tolerance"]["max_restarts"]
    with ExitStack() as open_ones:
        open_ones.enter_context(_nothing_unfinished(run_dir, folder))
        with waiting(say, start_of_ray()):
            cluster = open_ones.enter_context(VirtualCluster(**config["cluster"], groups_per_slot=groups_per_slot))
        for num_restarts in count():
            try:
                if num_restarts:
                    nodes = "Waiting for as many nodes as before"
                    is_private = cluster.is_private
                    with nullcontext() if is_private else waiting(say, nodes, begins=False, worth_saying_s=NODES_S):
                        cluster.renew()
                found = _run_once(config, run_dir, say, progress_stream, build, cluster, elapsed, folder)
                break
            except WorkerError as error:
                if num_restarts == allowed:
                    raise
                folder.check()
                unsaid = [f"warning: {text}" for text in restarts.append(f"{error}\n{error.details}\n")]
                say("\n".join([str(error), *unsaid, f"Restarting the workers ({num_restarts + 1} of {allowed})"]))
        summary: Summary = {
            **found,
            "world_size": cluster.world_size,
            "device": cluster.device,
            "restarts": num_restarts,
            "run_dir": str(run_dir),
        }
    folder.check()
    write_json_atomic(run_dir / SUMMARY_FILE, summary)
    return summary


@contextmanager
def _nothing_unfinished(run_dir: Path, folder: RunFolder) -> Iterator[None]:
    """Remove the checkpoint that was under way in the background when the run ended, once no worker writes there."""
    try:
        yield
    finally:
        with suppress(OSError):
            if folder.is_there():
                remove_unfinished(run_dir)


def _run_once(
    config: MasterConfig,
    run_dir: Path,
    say: Say,
    progress_stream: TextIO | None,
    build: Callable[[VirtualCluster], TrainingLoop],
    cluster: VirtualCluster,
    elapsed: Elapsed,
    folder: RunFolder,
) -> LoopSummary:
    clock = StartClock()
    with ExitStack() as on_failure:
        with waiting(say, f"Loading the model on {cluster.world_size} {cluster.device} worker(s)"):
            with clock.part("loading"):
                loop = build(cluster)
            on_failure.callback(loop.let_go)
            loop.elapsed, loop.folder = elapsed, folder
            folder.check()
            with clock.part("checkpoint"):
                if checkpoint := loop.resume():
                    say(f"Resuming from {checkpoint}")
        parts = loop.policy.start_seconds()
        loop.start_seconds = {**parts, **clock.seconds}
        if text := told(parts):
            say(f"Of that time: {text}")
        saving = config["checkpointing"]["enabled"]
        with (
            MetricLogger(run_dir, config["logger"], config, loop.step) as logger,
            Progress(loop.num_steps, enabled=True, stream=progress_stream) as progress,
            Termination(config["fault_tolerance"]["grace_period_s"] if saving else 0, progress.note) as termination,
        ):
            loop.run(logger, progress, termination)
        summary = loop.summary()
        on_failure.pop_all()
    loop.close()
    return summary
