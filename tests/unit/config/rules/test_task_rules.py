"""Rules about what is trained on and how it is scored: what breaks each, the essential words, a legal neighbor."""

import dataclasses
from collections.abc import Callable

import pytest

from nemo_rl_offload.config.rules import tasks
from nemo_rl_offload.config.rules.tasks import GIVEN_TO_ALL, task_params, task_sources
from nemo_rl_offload.config.validation import CheckedConfig

Check = Callable[..., CheckedConfig]
Refuses = Callable[[str, str, str, str], None]

COLOCATED = "policy.generation.colocated"
APART = f"{COLOCATED}.enabled=false cluster.gpus_per_node=4 {COLOCATED}.resources.gpus_per_node"
NODES_APART = f"{COLOCATED}.enabled=false cluster.num_nodes=3 {COLOCATED}.resources"
RUN_CASES = [
    (f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node", "Give at least 1", f"{APART}=2"),
    (f"{APART}=4", f"{COLOCATED}.resources.gpus_per_node", "at least 5", f"{APART}=3"),
    (
        f"{APART}=2 {COLOCATED}.resources.num_nodes=2",
        f"{COLOCATED}.resources.num_nodes",
        "Set it to 1, or null",
        f"{APART}=2 {COLOCATED}.resources.num_nodes=1",
    ),
    (
        f"{NODES_APART}.num_nodes=3",
        f"{COLOCATED}.resources.num_nodes",
        "at least 4",
        f"{NODES_APART}.num_nodes=2",
    ),
    (
        f"{NODES_APART}.num_nodes=1 {COLOCATED}.resources.gpus_per_node=1",
        f"{COLOCATED}.resources.gpus_per_node",
        ", or null",
        f"{COLOCATED}.resources.gpus_per_node=null",
    ),
    ("data.prompt_template=plain", "data.prompt_template", "Put {question}", "data.prompt_template=null"),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), RUN_CASES)
def test_run_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


BY_LOSS = "checkpointing.metric_name=val:loss checkpointing.higher_is_better=false"
SFT, DPO = f"algorithm=sft {BY_LOSS}", f"algorithm=dpo {BY_LOSS}"
FILES = "data.train.path=README.md data.validation.path=README.md"
DISTILLATION = "algorithm=distillation distillation.num_prompts_per_step=128"

MATH = "data.env_name=math"
ONE_UPDATE = "policy.train_global_batch_size=128 grpo.num_prompts_per_step=32 grpo.num_generations_per_prompt=4"
FUNCTION = "data.env_name=function"
ALONE = "grpo.num_generations_per_prompt=1 grpo.num_prompts_per_step=128"
ALGORITHM_CASES = [
    (
        "policy.train_global_batch_size=256",
        "policy.train_global_batch_size",
        "Set 128 for one update per step",
        "grpo.num_prompts_per_step=32",
    ),
    (
        "algorithm=distillation teacher.model_name=DENSE distillation.num_prompts_per_step=100",
        "policy.train_global_batch_size",
        "distillation.num_prompts_per_step x num_generations_per_prompt = 100 x 1",
        "distillation.num_prompts_per_step=256",
    ),
    (
        f"{ALONE} grpo.use_leave_one_out_baseline=false",
        "grpo.num_generations_per_prompt",
        "one alone has the advantage 0",
        "grpo.num_generations_per_prompt=2 grpo.num_prompts_per_step=64",
    ),
    (
        f"{ALONE} grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.num_generations_per_prompt",
        "one alone has the advantage 0",
        "grpo.adv_estimator.minus_baseline=false",
    ),
    (
        f"{ALONE} grpo.adv_estimator.name=reinforce_plus_plus grpo.adv_estimator.minus_baseline=false "
        "grpo.use_dynamic_sampling=true",
        "grpo.num_generations_per_prompt",
        "at least 2 while use_dynamic_sampling",
        "grpo.use_dynamic_sampling=false",
    ),
    ("grpo.batch_multiplier=2", "grpo.batch_multiplier", "nothing uses", "grpo.use_dynamic_sampling=true"),
    (
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.overlong_buffer_length",
        "64 is above the 8 tokens of policy.generation.max_new_tokens.",
        "grpo.reward_shaping.overlong_buffer_length=8",
    ),
    (
        "grpo.reward_shaping.enabled=true grpo.max_rollout_turns=3 policy.max_total_sequence_length=200 "
        f"{FUNCTION} env.function.path=my:f data.train.path=README.md data.validation.path=README.md",
        "grpo.reward_shaping.overlong_buffer_length",
        "64 is above the 24 tokens of policy.generation.max_new_tokens in 3 turns.",
        "grpo.reward_shaping.overlong_buffer_length=24",
    ),
    (
        "grpo.reward_shaping.enabled=true grpo.reward_shaping.max_response_length=24",
        "grpo.reward_shaping.overlong_buffer_length",
        "64 is above the 24 tokens of max_response_length.",
        "grpo.reward_shaping.overlong_buffer_length=24",
    ),
    (
        "grpo.reward_shaping.enabled=true grpo.max_rollout_turns=3 policy.max_total_sequence_length=200",
        "grpo.reward_shaping.overlong_buffer_length",
        "64 is above the 8 tokens of policy.generation.max_new_tokens.",
        "grpo.reward_shaping.overlong_buffer_length=8",
    ),
    (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss",
        "must be false while sequence_level_importance_ratios",
        "loss_fn.token_level_loss=false",
    ),
    ("loss_fn.use_cispo=true loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", "null", "loss_fn.ratio_clip_c=null"),
    (
        "loss_fn.disable_ppo_ratio=true loss_fn.ratio_clip_c=3",
        "loss_fn.ratio_clip_c",
        "null",
        "loss_fn.ratio_clip_c=null",
    ),
    (
        f"loss_fn.force_on_policy_ratio=true loss_fn.ratio_clip_c=3 {ONE_UPDATE}",
        "loss_fn.ratio_clip_c",
        "a loss that force_on_policy_ratio does not have",
        "loss_fn.ratio_clip_c=null",
    ),
    *(
        (
            f"loss_fn.disable_ppo_ratio=true loss_fn.{other}=true loss_fn.token_level_loss=false {ONE_UPDATE}",
            "loss_fn.disable_ppo_ratio",
            f"excluded by {other}",
            f"loss_fn.{other}=false",
        )
        for other in ("use_cispo", "force_on_policy_ratio", "sequence_level_importance_ratios")
    ),
    (
        "loss_fn.use_kl_in_reward=true loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.use_kl_in_reward",
        "only grpo.adv_estimator.name=reinforce_plus_plus has it in its advantages",
        "grpo.adv_estimator.name=reinforce_plus_plus",
    ),
    (
        "grpo.reward_scaling.enabled=true grpo.reward_scaling.source_min=1",
        "grpo.reward_scaling.source_min",
        "1 is not below grpo.reward_scaling.source_max = 1",
        "grpo.reward_scaling.source_min=-1",
    ),
    (
        "grpo.reward_scaling.enabled=true grpo.reward_scaling.target_min=1",
        "grpo.reward_scaling.target_min",
        "all rewards become the same",
        "grpo.reward_scaling.target_min=2",
    ),
    (
        "grpo.advantage_clip_low=2 grpo.advantage_clip_high=-2",
        "grpo.advantage_clip_low",
        "2 is not below grpo.advantage_clip_high = -2",
        "grpo.advantage_clip_low=null",
    ),
    (
        "grpo.max_num_steps=9 logger.profile.steps=[3,10]",
        "logger.profile.steps",
        "step 10 is never taken, for grpo.max_num_steps is 9",
        "logger.profile.steps=[3,9]",
    ),
    (
        "logger.profile.all_ranks=true",
        "logger.profile.all_ranks",
        "records nothing without logger.profile.steps",
        "logger.profile.steps=[3]",
    ),
    (
        "grpo.stop_at_validation_metric=accuracy",
        "grpo.stop_at_validation_metric",
        "has no effect without grpo.stop_at_validation_threshold",
        "grpo.stop_at_validation_threshold=0.5",
    ),
    (
        "grpo.stop_at_validation_threshold=0.5",
        "grpo.stop_at_validation_threshold",
        "has no effect without grpo.stop_at_validation_metric",
        "grpo.stop_at_validation_metric=reward",
    ),
    (
        "grpo.adv_estimator.name=gdpo",
        "grpo.adv_estimator.name",
        "gdpo compares several rewards, and data.env_name reasoning_gym gives one",
        "grpo.adv_estimator.name=grpo",
    ),
    (
        "grpo.stop_at_validation_metric=accuracy grpo.stop_at_validation_threshold=80",
        "grpo.stop_at_validation_threshold",
        "80 is never reached, for accuracy is a share",
        "grpo.stop_at_validation_threshold=0.8",
    ),
    (
        "grpo.stop_at_validation_metric=pass_k grpo.stop_at_validation_threshold=0.5",
        "grpo.stop_at_validation_metric",
        "pass_k needs several responses",
        "grpo.val_num_generations_per_prompt=2",
    ),
    (
        "grpo.stop_at_validation_metric=accuracy grpo.stop_at_validation_threshold=0.5 grpo.val_period=0 "
        "grpo.val_at_start=false",
        "grpo.stop_at_validation_metric",
        "has no effect without a validation before the end",
        "grpo.val_period=5",
    ),
    (
        "grpo.val_num_generations_per_prompt=4 policy.generation.val_temperature=0",
        "grpo.val_num_generations_per_prompt",
        "4 responses would all be the same one",
        "policy.generation.val_temperature=0.5",
    ),
    *(
        (
            f"checkpointing.checkpoint_must_save_by='{text}'",
            "checkpointing.checkpoint_must_save_by",
            "is not a duration. Write days, hours, minutes and seconds, like 00:03:45:00",
            "checkpointing.checkpoint_must_save_by='00:03:45:00'",
        )
        for text in ("03:45:00", "00:03:60:00", "4h")
    ),
    (
        "checkpointing.enabled=false checkpointing.checkpoint_must_save_by='00:03:45:00'",
        "checkpointing.checkpoint_must_save_by",
        "has no effect while checkpointing.enabled is false",
        "checkpointing.enabled=true",
    ),
    (DISTILLATION, "teacher.model_name", "missing value. Give one", "teacher.model_name=DENSE"),
    ("data.train.path=x", "data.train.path", "takes its problems from env.reasoning_gym", "data.train.path=null"),
    (
        "data.train.path=x",
        "data.train.path",
        "data.env_name to math or math_multi_reward or code_tests or function",
        f"{MATH} {FILES}",
    ),
    (MATH, "data.train.path", "data.env_name math takes problems from a file", FILES),
    (f"{MATH} data.train.path=x", "data.validation.path", "turn validation off", FILES),
    (
        f"{MATH} data.train.path=x data.train.split_validation_size=40.7",
        "data.train.split_validation_size",
        "40.7 is neither a share below 1 nor a number of records. Set 40, or a share.",
        f"{MATH} data.train.path=x data.train.split_validation_size=40",
    ),
    (f"{FUNCTION} {FILES}", "env.function.path", "missing value. Give one", "env.function.path=my.scores:by_length"),
    (
        f"{FUNCTION} {FILES} env.function.path=my/scores",
        "env.function.path",
        "names no function. Write it as package.module:name",
        "env.function.path=scores:by_length",
    ),
    (
        f"{FUNCTION} {FILES} env.function.path=my/scores.py",
        "env.function.path",
        "'my/scores.py' is the name of a file. Write its module and the function, as my.scores:name.",
        "env.function.path=my.scores:by_length",
    ),
    (
        f"{FUNCTION} {FILES} env.function.path=scores.py:by_length",
        "env.function.path",
        "as scores:by_length.",
        "env.function.path=scores:by_length",
    ),
    (
        f"{MATH} {FILES} env.math.memory_limit=4GB",
        "env.math.memory_limit",
        "'4GB' is not a size. Write a number and one of KiB, MiB, GiB, TiB, like 32GiB.",
        "env.math.memory_limit=null",
    ),
    (
        f"{FUNCTION} {FILES} env.function.path=my:f env.function.memory_limit=0GiB",
        "env.function.memory_limit",
        "is not a size above 0",
        "env.function.memory_limit=1.5GiB",
    ),
    *(
        (
            f"{MATH} {FILES} env.math.thinking_tags={tags}",
            "env.math.thinking_tags",
            "are not the begin and the end of thinking. Give two, like [<think>, </think>], or null",
            f"env.math.thinking_tags={right}",
        )
        for tags, right in (("[a]", "[a,b]"), ("[a,b,c]", "null"), ("[a,a]", "[a,b]"), ("[a,'']", "[a,b]"))
    ),
    (DPO, "data.train.path", "takes preference pairs from a file", FILES),
    (
        f"{SFT} data.train.path=README.md",
        "data.validation.path",
        "sft.val_period=0 sft.val_at_start=false sft.val_at_end=false",
        "sft.val_period=0 sft.val_at_start=false sft.val_at_end=false",
    ),
    (f"{SFT} data.validation.path=README.md", "data.train.path", "data.validation.path is given", FILES),
    ("algorithm=sft", "checkpointing.metric_name", "sft has no val:accuracy. Allowed: val:loss", BY_LOSS),
    (
        "algorithm=sft checkpointing.metric_name=val:loss",
        "checkpointing.higher_is_better",
        "the worst checkpoints by val:loss. Set it to false",
        "checkpointing.higher_is_better=false",
    ),
    (
        "checkpointing.higher_is_better=false",
        "checkpointing.higher_is_better",
        "Set it to true",
        "checkpointing.metric_name=train:loss",
    ),
    ("env.reasoning_gym.task=null", "env.reasoning_gym.task", "missing value", f"{SFT} {FILES}"),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), ALGORITHM_CASES)
def test_algorithm_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


PARAMS = "env.reasoning_gym.params"
NONE = f"~{PARAMS}.min_word_len ~{PARAMS}.max_word_len"

TASK_CASES = [
    (
        "env.reasoning_gym.task=spel_backward",
        "env.reasoning_gym.task",
        "Did you mean 'spell_backward'?",
        f"env.reasoning_gym.task=chain_sum {NONE}",
    ),
    (
        "env.reasoning_gym.task=zzzzzz",
        "env.reasoning_gym.task",
        "Some of them: ",
        f"env.reasoning_gym.task=composite {NONE}",
    ),
    (
        f"+{PARAMS}.max_wordlen=6",
        f"{PARAMS}.max_wordlen",
        "not a parameter of task 'spell_backward'. Did you mean 'max_word_len'? It has: min_word_len, max_word_len, ",
        f"~{PARAMS}.max_wordlen",
    ),
]


@pytest.mark.parametrize(("broken", "path", "words", "legal"), TASK_CASES)
def test_task_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


def test_what_is_known_of_tasks_is_what_reasoning_gym_registers() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(task_sources()) == set(DATASETS)
    known = {task: found for task in DATASETS if (found := task_params(task))}
    fields = {task: [field.name for field in dataclasses.fields(DATASETS[task][1])] for task in known}
    assert known == {task: tuple(name for name in names if name not in GIVEN_TO_ALL) for task, names in fields.items()}
    assert len(known) > 0.9 * len(DATASETS)


@pytest.mark.parametrize("overrides", ["policy.megatron_cfg.scheduler.lr_decay_style=linear", "grpo.max_num_steps=6"])
def test_legal_combinations_pass_without_warning(check: Check, overrides: str) -> None:
    assert check(overrides).warnings == []


def test_an_algorithm_with_one_key_of_groups_is_checked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "algorithm_has", lambda key, get: key == "use_dynamic_sampling")
    values = {"algorithm": "mine", "mine.num_generations_per_prompt": 1, "mine.use_dynamic_sampling": True}
    (message,) = tasks._groups(values.__getitem__)
    assert message.startswith("mine.num_generations_per_prompt: must be at least 2 while use_dynamic_sampling")


@pytest.mark.parametrize(
    ("turns", "total", "is_told"), [(1, 96, False), (2, 96, True), (3, 127, True), (2, 128, False), (3, 200, False)]
)
def test_a_second_turn_that_has_no_room_is_told(check: Check, turns: int, total: int, is_told: bool) -> None:
    checked = check(
        f"grpo.max_rollout_turns={turns}",
        f"policy.max_total_sequence_length={total}",
        "data.max_input_seq_length=32",
        "policy.generation.max_new_tokens=48",
    )
    told = [text for text in checked.warnings if "Set policy.max_total_sequence_length at least 128." in text]
    assert bool(told) == is_told


@pytest.mark.parametrize(("response", "is_told"), [(95, False), (96, False), (97, True), (512, True)])
def test_responses_that_never_get_so_long_are_told(check: Check, response: int, is_told: bool) -> None:
    checked = check("policy.max_total_sequence_length=96", f"policy.generation.max_new_tokens={response}")
    told = [text for text in checked.warnings if text.startswith("policy.generation.max_new_tokens: ")]
    assert [f"{response} has no effect above" in text for text in told] == [True] * is_told


def test_pairs_have_no_column_of_one_answer(refuses: Refuses) -> None:
    """Told with its place, before the data are read."""
    key = "data.train.output_key"
    refuses(f"{DPO} {FILES} {key}=chosen", key, "pairs have two answers", f"{DPO} {FILES} {key}=null")


def test_pairs_of_which_nothing_is_learned_are_refused(refuses: Refuses) -> None:
    key = "dpo.preference_loss_weight"
    words = "0, and so is dpo.sft_loss_weight: nothing would be learned"
    refuses(f"{DPO} {FILES} {key}=0", key, words, f"{DPO} {FILES} {key}=0 dpo.sft_loss_weight=0.5")
