"""Keys of a run, whatever it trains: `logger`, `checkpointing`, `fault_tolerance`, `cluster`."""

from typing import Annotated, Literal, TypedDict

from nemo_rl_offload.config.types import Count, Default, NonNegative, Positive, Seconds, closed


@closed
class WandbConfig(TypedDict):
    project: Annotated[str, Default("nemo-rl-offload")]
    """Project of the run."""
    name: Annotated[str | None, Default(None)]
    """Name of the run; null: that of the run directory."""


@closed
class MlflowConfig(TypedDict):
    experiment_name: Annotated[str, Default("nemo-rl-offload")]
    """Experiment of the run."""
    run_name: Annotated[str | None, Default(None)]
    """Name of the run; null: that of the run directory."""
    tracking_uri: Annotated[str | None, Default(None)]
    """Server or store; null: mlflow.db in the run directory."""


@closed
class ProfileConfig(TypedDict):
    steps: Annotated[list[Positive], Default([])]
    """Steps that are recorded with torch's profiler, counted from 1, each as profile/step_N_rank_R.json.gz."""
    all_ranks: Annotated[bool, Default(False)]
    """Record every rank that trains, not the first alone."""


@closed
class SwanlabConfig(TypedDict):
    project: Annotated[str, Default("nemo-rl-offload")]
    """Project of the run."""
    name: Annotated[str | None, Default(None)]
    """Name of the run; null: that of the run directory."""


@closed
class GpuMonitoringConfig(TypedDict):
    collection_interval: Annotated[Seconds, Default(10)]
    """Seconds between samples."""
    flush_interval: Annotated[Seconds, Default(10)]
    """Seconds between writing them."""


@closed
class LoggerConfig(TypedDict):
    tensorboard_enabled: Annotated[bool, Default(True)]
    """Write metrics for TensorBoard."""
    jsonl_enabled: Annotated[bool, Default(True)]
    """Write metrics to metrics.jsonl."""
    num_val_samples_to_print: Annotated[Count, Default(2)]
    """Responses that each validation shows, from the lowest to the highest reward."""
    num_samples_to_keep: Annotated[Count, Default(16)]
    """Responses of each validation, and of steps of training, that are added to samples.jsonl; 0: no such file."""
    sample_period: Annotated[Count, Default(10)]
    """Steps between those of training whose responses are kept; 0: those of validation alone."""
    profile: ProfileConfig
    """Traces of single steps, which Perfetto opens."""
    wandb_enabled: Annotated[bool, Default(False)]
    """Write metrics for Weights & Biases (`uv sync --group wandb`), offline unless WANDB_MODE says otherwise."""
    mlflow_enabled: Annotated[bool, Default(False)]
    """Write metrics for MLflow (`uv sync --group mlflow`)."""
    swanlab_enabled: Annotated[bool, Default(False)]
    """Write metrics for SwanLab (`uv pip install swanlab`), offline unless SWANLAB_MODE says otherwise."""
    wandb: WandbConfig
    """Weights & Biases."""
    mlflow: MlflowConfig
    """MLflow."""
    swanlab: SwanlabConfig
    """SwanLab."""
    monitor_gpus: Annotated[bool, Default(False)]
    """Write utilization and memory of the GPUs of the driver's machine, with the prefix ray, as NeMo-RL does."""
    gpu_monitoring: GpuMonitoringConfig
    """How often."""


@closed
class CheckpointingConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Write checkpoints."""
    checkpoint_dir: Annotated[str | None, Default(None)]
    """The run directory, where --run-dir gives none; null: results/<config name>."""
    save_period: Annotated[Positive, Default(10)]
    """Steps between checkpoints."""
    keep_top_k: Annotated[Positive | None, Default(3)]
    """Checkpoints that are kept, best first; null keeps all."""
    metric_name: Annotated[
        Literal["val:accuracy", "val:reward", "val:loss", "train:reward", "train:loss", None], Default("val:accuracy")
    ]
    """Metric that ranks checkpoints, val: by the validation of their own step; null: the latest are kept."""
    higher_is_better: Annotated[bool, Default(True)]
    """Whether a higher metric is better."""
    checkpoint_must_save_by: Annotated[str | None, Default(None)]
    """DD:HH:MM:SS after its start by which a run has saved a checkpoint and ended; null: no such end."""
    save_optimizer: Annotated[bool, Default(True)]
    """Whether checkpoints have the optimizer's state; a run that goes on from one without begins that anew."""
    is_async: Annotated[bool, Default(False)]
    """Write checkpoints while training goes on, from a copy in host memory."""


@closed
class FaultToleranceConfig(TypedDict):
    max_restarts: Annotated[Count, Default(0)]
    """Times that a run starts its workers again after one died or failed, from the last checkpoint."""
    grace_period_s: Annotated[NonNegative, Default(25)]
    """Seconds that a step and a checkpoint may take after SIGTERM; 0: end at once, without a checkpoint."""
    max_skipped_steps: Annotated[Count, Default(5)]
    """Steps in a row that may be skipped because the loss or a gradient is not finite; one more ends the run."""


@closed
class ClusterConfig(TypedDict):
    num_nodes: Annotated[Positive, Default(1)]
    """Machines."""
    gpus_per_node: Annotated[Positive | Literal["auto"], Default("auto")]
    """Workers per machine, one per GPU where there are GPUs; auto: all GPUs, or one worker on the CPU."""
    bind: Annotated[str, Default("auto")]
    """Network interface on which workers listen for each other; auto: loopback on one machine, else Ray's."""
