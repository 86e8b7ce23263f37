"""The configuration's keys, in NeMo-RL's and Megatron-Core's names, each with its type, range, default and one line.

A key stands in its section, below `sections`, and nowhere else; every section has its name here. `python
tools/config_reference.py` writes `examples/configs/base.yaml`, the file of defaults that users inherit, from them: the
keys in their order, the line below each as its comment, and the comments and blank lines between them as they stand
there. The tables of `docs/configuration.md` are written from them too.

Sections are closed: a key that is not listed is an error, so each one has code that reads it. Types are strict: no
text becomes a number and no number a truth value; only a whole number may stand for any number. A default may be an
interpolation, or `???` where a value must be given. `Forwarded` keys are handed to the field of the same name of
Megatron-Core's TransformerConfig without any further code. Where a key of `policy.megatron_cfg` may be null and nothing
else is said, null leaves what the model's own configuration says.
"""

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.sections.algorithms import (
    AdvEstimatorConfig,
    AsyncGRPOConfig,
    DistillationConfig,
    DPOConfig,
    EvalConfig,
    GRPOConfig,
    LossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    SFTConfig,
)
from nemo_rl_offload.config.sections.data import (
    CodeTestsConfig,
    DataConfig,
    EnvConfig,
    FunctionConfig,
    FurtherTrainingDataConfig,
    FurtherValidationDataConfig,
    MathConfig,
    MathMultiRewardConfig,
    NemoGymConfig,
    ProblemsConfig,
    ReasoningGymConfig,
    TrainingDataConfig,
    ValidationDataConfig,
)
from nemo_rl_offload.config.sections.megatron import (
    ActivationOffloadConfig,
    CpuAffinityConfig,
    DistributedDataParallelConfig,
    Fp8Config,
    MegatronConfig,
    OptimizerConfig,
    PeftConfig,
    SchedulerConfig,
)
from nemo_rl_offload.config.sections.policy import (
    ChatConfig,
    ColocatedConfig,
    DynamicBatchingConfig,
    GenerationConfig,
    GenerationResources,
    PolicyConfig,
    RouterReplayConfig,
    SequencePackingConfig,
    TeacherConfig,
    TokenizerConfig,
    VllmConfig,
)
from nemo_rl_offload.config.sections.run import (
    CheckpointingConfig,
    ClusterConfig,
    FaultToleranceConfig,
    GpuMonitoringConfig,
    LoggerConfig,
    MlflowConfig,
    ProfileConfig,
    SwanlabConfig,
    WandbConfig,
)
from nemo_rl_offload.config.types import Default, closed

__all__ = [
    "ActivationOffloadConfig",
    "AdvEstimatorConfig",
    "AsyncGRPOConfig",
    "ChatConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "CodeTestsConfig",
    "ColocatedConfig",
    "CpuAffinityConfig",
    "DPOConfig",
    "DataConfig",
    "DistillationConfig",
    "DistributedDataParallelConfig",
    "DynamicBatchingConfig",
    "EnvConfig",
    "EvalConfig",
    "FaultToleranceConfig",
    "Fp8Config",
    "FunctionConfig",
    "FurtherTrainingDataConfig",
    "FurtherValidationDataConfig",
    "GRPOConfig",
    "GenerationConfig",
    "GenerationResources",
    "GpuMonitoringConfig",
    "LoggerConfig",
    "LossConfig",
    "MasterConfig",
    "MathConfig",
    "MathMultiRewardConfig",
    "MegatronConfig",
    "MlflowConfig",
    "NemoGymConfig",
    "OptimizerConfig",
    "PeftConfig",
    "PolicyConfig",
    "ProblemsConfig",
    "ProfileConfig",
    "ReasoningGymConfig",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "RouterReplayConfig",
    "SFTConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
    "SwanlabConfig",
    "TeacherConfig",
    "TokenizerConfig",
    "TrainingDataConfig",
    "ValidationDataConfig",
    "VllmConfig",
    "WandbConfig",
]

if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[tuple(ALGORITHMS.built_in)]


@closed
class MasterConfig(TypedDict):
    algorithm: Annotated[Algorithm, Default("grpo")]
    """What is run; the sections of other algorithms have no effect."""
    policy: PolicyConfig
    """The model and how it is trained."""
    teacher: TeacherConfig
    """The model that distillation learns from."""
    loss_fn: LossConfig
    """The loss of grpo and of distillation."""
    grpo: GRPOConfig
    """Group Relative Policy Optimization."""
    sft: SFTConfig
    """Supervised fine-tuning."""
    dpo: DPOConfig
    """Direct Preference Optimization."""
    distillation: DistillationConfig
    """Distillation of a teacher on the student's own responses."""
    eval: EvalConfig
    """Evaluation without training."""
    data: DataConfig
    """Problems, prompts and files."""
    env: EnvConfig
    """Rewards."""
    logger: LoggerConfig
    """Where metrics go."""
    checkpointing: CheckpointingConfig
    """When checkpoints are written and which are kept."""
    fault_tolerance: FaultToleranceConfig
    """What a run survives."""
    cluster: ClusterConfig
    """Machines and devices."""
