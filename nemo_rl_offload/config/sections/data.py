"""Keys of `data` and `env`: where problems and records come from, and what responses are worth."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from annotated_types import Gt, Le

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.types import Default, NonNegative, Positive, Seconds, Seed, Share, Size, closed

NumProblems = Annotated[int, Gt(0), Le(10_000_000)]
if TYPE_CHECKING:
    EnvironmentName = str
else:
    EnvironmentName = Literal[tuple(ENVIRONMENTS.built_in)]


@closed
class ProblemsConfig(TypedDict):
    seed: Seed
    """Seed of the problem generator; problem i uses seed + i."""
    size: NumProblems
    """Number of problems, whose order is held in memory."""


@closed
class FurtherTrainingDataConfig(TypedDict):
    path: str
    """File, folder or hf://datasets/OWNER/NAME."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it; null: all."""
    split_validation_size: Annotated[NonNegative, Default(0.0)]
    """Records of it that are taken for validation: below 1 a share, else a number."""
    seed: Annotated[Seed, Default(1_000_000)]
    """Seed of both choices."""


@closed
class FurtherValidationDataConfig(TypedDict):
    path: str
    """File, folder or hf://datasets/OWNER/NAME."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it; null: all."""
    repeat: Annotated[Positive, Default(1)]
    """Times that each record is taken."""
    seed: Annotated[Seed, Default(10_000_000)]
    """Seed of the choice."""


@closed
class TrainingDataConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """File, folder or hf://datasets/OWNER/NAME: conversations (sft), pairs (dpo), problems; null: reasoning-gym's."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt, such as question or prompt.0.content; null: under one of the usual names."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer; null: under one of the usual names."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it, before any are taken for validation; null: all."""
    split_validation_size: Annotated[NonNegative, Default(0.0)]
    """Records that are taken for validation, besides data.validation: below 1 a share, else a number."""
    further: Annotated[list[FurtherTrainingDataConfig], Default([])]
    """Further data sets: these keys, and their defaults, but for size. A list in data.train's place says the same."""
    seed: Annotated[Seed, Default(1_000_000)]
    """Seed of these choices, and of the problem generator; problem i uses seed + i."""
    size: Annotated[NumProblems, Default(20_000)]
    """Number of problems, whose order is held in memory."""


@closed
class ValidationDataConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """The same for validation."""
    split: Annotated[str | None, Default(None)]
    """The same for validation."""
    input_key: Annotated[str | None, Default(None)]
    """The same for validation."""
    output_key: Annotated[str | None, Default(None)]
    """The same for validation."""
    max_samples: Annotated[Positive | None, Default(None)]
    """The same for validation."""
    repeat: Annotated[Positive, Default(1)]
    """Times that each record is taken."""
    further: Annotated[list[FurtherValidationDataConfig], Default([])]
    """The same for validation."""
    seed: Annotated[Seed, Default(10_000_000)]
    """Seed of that choice, and of the problem generator; problem i uses seed + i."""
    size: Annotated[NumProblems, Default(256)]
    """Number of problems, whose order is held in memory."""
    exclude: Annotated[list[ProblemsConfig], Default([])]
    """List of {seed, size}: problems that validation must not contain, such as those the start model was trained on."""


@closed
class DataConfig(TypedDict):
    env_name: Annotated[EnvironmentName, Default("reasoning_gym")]
    """The section of env that scores responses (grpo, distillation)."""
    shuffle: Annotated[bool, Default(True)]
    """Draw training problems in random order, anew in each epoch."""
    max_input_seq_length: Annotated[Positive, Default(256)]
    """Longest prompt, in tokens."""
    prompt_template: Annotated[str | None, Default(None)]
    """Prompt around {question}; null: the tokenizer's chat template."""
    prompt_file: Annotated[str | None, Default(None)]
    """File with the text of a user's turn around the question, which stands at {}; null: the question alone."""
    system_prompt_file: Annotated[str | None, Default(None)]
    """File with the text of a system turn before it; null: none."""
    add_bos: Annotated[bool, Default(False)]
    """Begin a record with the tokenizer's beginning token where the chat template does not (sft, dpo)."""
    add_eos: Annotated[bool, Default(False)]
    """End a record's last turn with the end token where the chat template does not (sft, dpo)."""
    on_bad_line: Annotated[Literal["error", "skip"], Default("error")]
    """A record that cannot be used ends the run (error), or is left out and counted (skip)."""
    train: TrainingDataConfig
    """Training data; problems that validation contains are removed."""
    validation: ValidationDataConfig
    """Validation data."""


@closed
class ReasoningGymConfig(TypedDict):
    task: Annotated[str | None, Default(None)]
    """Name of a reasoning-gym data set; null where data comes from files."""
    params: Annotated[dict[str, Any], Default({})]
    """Parameters of that data set."""
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""
    timeout_s: Annotated[Seconds | None, Default(10.0)]
    """Seconds that the scoring of one response may take; a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that the scoring of one response may take; one that needs more counts 0. null: no limit."""
    binary_reward: Annotated[bool, Default(False)]
    """Reward 1 for a score from correct_threshold on and 0 below (true), or the score itself (false)."""
    correct_threshold: Annotated[Share, Default(0.999)]
    """Score from which a response counts as correct."""


@closed
class MathConfig(TypedDict):
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""
    comparison: Annotated[
        Literal["symbolic", "exact", "dapo", "english_multichoice", "multilingual_multichoice"], Default("symbolic")
    ]
    """Answers are equal by value (math-verify), as text; dapo: what follows "Answer:"; the others: a letter there."""
    thinking_tags: Annotated[list[str] | None, Default(["<think>", "</think>"])]
    """Begin and end of thinking, in which no answer is looked for; null: everywhere."""
    timeout_s: Annotated[Seconds | None, Default(10.0)]
    """Seconds that the scoring of one response may take; a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that the scoring of one response may take; one that needs more counts 0. null: no limit."""


@closed
class MathMultiRewardConfig(TypedDict):
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""


@closed
class CodeTestsConfig(TypedDict):
    num_workers: Annotated[Positive, Default(1)]
    """Processes that test programs, each one program at a time."""
    sandbox: Annotated[Literal["required", "off"], Default("required")]
    """Programs lose all rights, or the run is refused (required); off: they have yours, on a machine made for that."""
    timeout_s: Annotated[Seconds, Default(5.0)]
    """Seconds that one test may take; a test that takes longer has failed."""
    memory_limit: Annotated[Size, Default("1GiB")]
    """Memory, in addresses, that a program may have; one that needs more fails."""
    binary_reward: Annotated[bool, Default(True)]
    """Reward 1 where all tests pass and 0 otherwise (true), or the share of them that pass (false)."""
    thinking_tags: Annotated[list[str] | None, Default(["<think>", "</think>"])]
    """Begin and end of thinking, in which no program is looked for; null: everywhere."""


@closed
class FunctionConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """The function, as package.module:name."""
    params: Annotated[dict[str, Any], Default({})]
    """Further arguments of the function, by name."""
    num_workers: Annotated[Positive, Default(1)]
    """Processes that call it."""
    timeout_s: Annotated[Seconds | None, Default(60.0)]
    """Seconds that one call may take; the response of a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that one call may take; a response that needs more counts 0. null: no limit."""


@closed
class NemoGymConfig(TypedDict):
    python: Annotated[str | None, Default(None)]
    """The Python of an environment that has nemo-gym, which needs one of its own; null: .nemo-gym/bin/python."""
    config: Annotated[dict[str, Any], Default({})]
    """What NeMo-Gym is told: config_paths, and its servers by name. Further keys of the section are put here."""
    mask_flagged_samples: Annotated[bool, Default(True)]
    """Learn nothing from episodes that their environment flags (mask_sample)."""
    invalid_tool_call_patterns: Annotated[
        list[str], Default(["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"])
    ]
    """A turn in whose text one of these is left has called no tool (grpo.invalid_tool_call_advantage)."""
    thinking_tags: Annotated[list[str], Default(["<think>", "</think>"])]
    """A turn in whose text one of these is left has malformed thinking (grpo.malformed_thinking_advantage)."""


@closed
class EnvConfig(TypedDict):
    reasoning_gym: ReasoningGymConfig
    """Problems and their verification by reasoning-gym."""
    math: MathConfig
    """Verification of mathematical answers."""
    math_multi_reward: MathMultiRewardConfig
    """Several rewards for an answer between tags: correctness, format, integer."""
    code_tests: CodeTestsConfig
    """Tests of programs, which run without rights."""
    function: FunctionConfig
    """Verification by a Python function."""
    nemo_gym: NemoGymConfig
    """Episodes with tools, led by NeMo-Gym (grpo)."""
