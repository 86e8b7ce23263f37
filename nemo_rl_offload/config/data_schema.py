"""The schema's sections `data` and `env`: what is trained on, and what scores it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from annotated_types import Gt, Le

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.types import Positive, Seed, Share, closed

if TYPE_CHECKING:
    EnvironmentName = str
else:
    EnvironmentName = Literal[tuple(ENVIRONMENTS.built_in)]


@closed
class ProblemsConfig(TypedDict):
    seed: Seed
    """Seed of the problem generator; problem i uses seed + i."""
    size: Annotated[int, Gt(0), Le(10_000_000)]
    """Number of problems, whose order is held in memory."""


@closed
class TrainingDataConfig(ProblemsConfig):
    path: str | None
    """File or folder: conversations (sft), preference pairs (dpo), problems (math, function); null: reasoning-gym's."""
    split: str | None
    """Split to take from a folder that holds several."""


@closed
class ValidationDataConfig(ProblemsConfig):
    path: str | None
    """The same for validation."""
    split: str | None
    """The same for validation."""
    exclude: list[ProblemsConfig]
    """Problems that validation must not contain, such as those that the start model was trained on."""


@closed
class DataConfig(TypedDict):
    env_name: EnvironmentName
    """The section of env that scores responses (grpo, distillation)."""
    shuffle: bool
    """Draw training problems in random order, anew in each epoch."""
    max_input_seq_length: Positive
    """Longest prompt, in tokens."""
    prompt_template: str | None
    """Prompt around {question}; null: the tokenizer's chat template."""
    on_bad_line: Literal["error", "skip"]
    """A record that cannot be used ends the run (error), or is left out and counted (skip)."""
    train: TrainingDataConfig
    """Training data; problems that validation contains are removed."""
    validation: ValidationDataConfig
    """Validation data."""


@closed
class ReasoningGymConfig(TypedDict):
    task: str | None
    """Name of a reasoning-gym data set; null where data comes from files."""
    params: dict[str, Any]
    """Parameters of that data set."""
    num_workers: Positive
    """Actors that score responses."""
    binary_reward: bool
    """Reward 1 for a score from correct_threshold on and 0 below (true), or the score itself (false)."""
    correct_threshold: Share
    """Score from which a response counts as correct."""


@closed
class MathConfig(TypedDict):
    num_workers: Positive
    """Actors that score responses."""
    comparison: Literal["symbolic", "exact"]
    """Answers are equal by value (math-verify), or as text (the last boxed answer, or all)."""


@closed
class FunctionConfig(TypedDict):
    path: str | None
    """The function, as package.module:name."""
    params: dict[str, Any]
    """Further arguments of the function, by name."""
    num_workers: Positive
    """Actors that call it."""
    timeout_s: Annotated[float, Gt(0)] | None
    """Seconds that the responses of one turn may take, all together; null: no limit."""


@closed
class EnvConfig(TypedDict):
    reasoning_gym: ReasoningGymConfig
    """Problems and their verification by reasoning-gym."""
    math: MathConfig
    """Verification of mathematical answers."""
    function: FunctionConfig
    """Verification by a Python function."""
