"""Experiment trackers as metric sinks: Weights & Biases, MLflow and SwanLab, each imported only where it is asked for.

They write into the run directory and reach no server: a cluster's nodes often cannot. `wandb sync RUN_DIR/wandb/*`,
`swanlab sync RUN_DIR/swanlab/*` and MLflow's own tools take it from there. A resumed run goes on in the same tracked
run, whose id stands in the run directory.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from nemo_rl_offload.config.schema import MlflowConfig, SwanlabConfig, WandbConfig
from nemo_rl_offload.runs.plain_files import make_folder, read_plain, written_anew
from nemo_rl_offload.runs.run_directory import MLFLOW_DATABASE, MLFLOW_ID_FILE, SWANLAB, SWANLAB_ID_FILE, WANDB_ID_FILE


def _flat(config: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Values by their paths in the configuration."""
    found: dict[str, object] = {}
    for key, value in config.items():
        inner = f"{path}.{key}".lstrip(".")
        found |= _flat(value, inner) if isinstance(value, Mapping) else {inner: value}
    return found


class Wandb:
    """A run of Weights & Biases; offline unless WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, section: WandbConfig, config: Mapping[str, object]) -> None:
        import wandb

        id_file = run_dir / WANDB_ID_FILE
        self._run = wandb.init(
            project=section["project"],
            name=section["name"] or run_dir.name,
            dir=str(run_dir),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(config),
            id=read_plain(id_file).decode() if id_file.exists() else None,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        with written_anew(id_file) as file:
            file.write(self._run.id.encode())

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        # A step of its own for every call: their step must grow, and validation follows training in the same step.
        self._run.log({f"{prefix}/{name}": value for name, value in metrics.items()} | {f"{prefix}/step": step})

    def close(self) -> None:
        self._run.finish()


class Swanlab:
    """A run of SwanLab; offline unless SWANLAB_MODE says otherwise."""

    def __init__(self, run_dir: Path, section: SwanlabConfig, config: Mapping[str, object]) -> None:
        import swanlab

        id_file, folder = run_dir / SWANLAB_ID_FILE, run_dir / SWANLAB
        make_folder(folder)
        self._run = swanlab.init(
            project=section["project"],
            name=section["name"] or run_dir.name,
            log_dir=str(folder),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            config=dict(config),
            id=read_plain(id_file).decode() if id_file.exists() else None,
            resume="allow",
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        with written_anew(id_file) as file:
            file.write(self._run.id.encode())

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        self._run.log({f"{prefix}/{name}": value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow, in a database in the run directory unless `tracking_uri` names another place."""

    def __init__(self, run_dir: Path, section: MlflowConfig, config: Mapping[str, object]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(section["tracking_uri"] or f"sqlite:///{(run_dir / MLFLOW_DATABASE).resolve()}")
        id_file = run_dir / MLFLOW_ID_FILE
        if id_file.exists():
            self._id = read_plain(id_file).decode()
            return
        name = section["experiment_name"]
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=section["run_name"] or run_dir.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _flat(config).items()]
        for start in range(0, len(params), 100):  # MLflow takes so many at a time
            self._client.log_batch(self._id, params=params[start : start + 100])
        with written_anew(id_file) as file:
            file.write(self._id.encode())

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        milliseconds = int(wall_time_s * 1000)
        rows = [
            self._metric(f"{prefix}/{name}", value, milliseconds, step)
            for name, value in metrics.items()
            if math.isfinite(value)  # some of its stores refuse others
        ]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)
