"""What a configuration in NeMo-RL's language becomes here.

The values are walked once, beside the schema. What the schema has stays as it is; of anything else `table.py` says
whether it is honoured, accepted, without effect or refused, and what neither knows is a mistake. Then the keys that are
honoured become this project's: those of DTensor in `dtensor.py`, those of data sets in `data_sections.py`, others here.
Types are checked on the way, so that a wrong value is named by the key that its author wrote.
"""

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, is_typeddict

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nemo_rl_offload.config.full_schema import OTHER_NAMES, full_schema, right_place, section_at
from nemo_rl_offload.config.nemo_rl.table import Row, keys_in, rows, sections
from nemo_rl_offload.config.rules.rule import read_model_config
from nemo_rl_offload.config.sources import nodes
from nemo_rl_offload.config.types import defaults_of, describe, item_type, keys_of
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.model_shape import parse_model_shape

MEGATRON = "policy.megatron_cfg"
NOT_ALLOWED = "is not allowed. Allowed: "
"""What follows a value of another type."""
_FP8_OF_TEACHER = "teacher.megatron_cfg.fp8_cfg"
_WIDE_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_OTHER_VALUES = ("generation.backend", "sequence_packing.algorithm")
"""Keys of a teacher that have no effect, and have more values in NeMo-RL than here."""
_ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "dynamo": "Dynamo"}
_METRICS = {
    "val:val_loss": "val:loss",
    "val:validation-default_loss": "val:loss",
    "val:total_reward/mean": "val:reward",
    "train:total_reward/mean": "train:reward",
}


@dataclass
class Translation:
    """A configuration in this project's keys, and what is to be said about those that it came from."""

    values: dict[str, Any]
    given: Container[str]
    """Paths of the values that their author wrote; the others are defaults."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is refused, by path."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Why a key has no effect, by its path."""
    warnings: list[str] = field(default_factory=list)
    """Lines that begin with a path."""
    honoured: dict[str, Any] = field(default_factory=dict)
    """Values of the keys that code makes others of."""
    became: dict[str, str] = field(default_factory=dict)
    """The path of the key that a value comes from, by its own path."""

    def get(self, path: str) -> Any:
        """The value at a path; None where there is none."""
        node: Any = self.values
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def set(self, path: str, value: Any, source: str = "") -> None:
        """Put a value at a path, made of that at ``source``; nothing below a value that is no section."""
        *parents, key = path.split(".")
        node = self.values
        for part in parents:
            inner = {} if (found := node.get(part)) is None else found
            if not isinstance(inner, Mapping):
                return
            node[part] = node = dict(inner)
        node[key] = value
        if source:
            self.became[path] = source

    @property
    def is_recipe(self) -> bool:
        """Whether it has keys that only NeMo-RL knows."""
        return bool(self.honoured or self.without_effect)


def read_section(translation: Translation, node: Mapping[str, Any], path: str, annotation: Any) -> dict[str, Any]:
    """Return what of a section the schema takes; the rest goes into the translation's other fields."""
    kept = {}
    known, is_free = keys_of(annotation), annotation is Any or item_type(annotation, dict) is not None
    for key, value in node.items():
        place = f"{path}.{key}".lstrip(".")
        if key not in known:
            if is_free and place not in rows():
                kept[key] = value
            else:
                read_key(translation, place, value)
        elif is_typeddict(known[key]) and isinstance(value, Mapping):
            kept[key] = read_section(translation, value, place, known[key])
        else:
            kept[key] = value
    return kept


def read_key(translation: Translation, path: str, value: Any) -> None:
    """Note what becomes of a key that the schema does not have."""
    if path.startswith("teacher."):
        _read_key_of_teacher(translation, path, value)
        return
    row = rows().get(path)
    if row is None and path in sections():
        if isinstance(value, Mapping):
            read_section(translation, value, path, None)
        elif value is not None:
            translation.problems[path] = f"{shown(value)} {NOT_ALLOWED}a section of keys."
    elif row is None:
        if not any(path.startswith(f"{each.path}.") for each in rows().values() if each.is_open):
            translation.problems[path] = unknown_key(path)
    elif path in sections() and isinstance(value, Mapping):
        read_section(translation, value, path, None)
        if row.is_open or row.verdict == "honoured":
            _apply(translation, row, value)
    else:
        _apply(translation, row, value)


def is_known(section: str) -> bool:
    """Whether the schema or the table has a key beside the sections."""
    return section in keys_of(full_schema()) or section in rows() or section in sections()


def _apply(translation: Translation, row: Row, value: Any) -> None:
    if not row.fits(value):
        translation.problems[row.path] = f"{shown(value)} {NOT_ALLOWED}{row.allowed}."
    elif row.verdict == "none":
        translation.without_effect[row.path] = row.reason
    elif row.verdict == "honoured":
        translation.honoured[row.path] = value
    elif row.verdict == "only":
        if value not in row.values or type(value) is bool is not type(row.values[0]):
            allowed = " or ".join(map(shown, row.values))
            refuse(translation, row.path, value, row.feature, row.reason, f"Set it to {allowed}.")
    elif value is not None and value != {}:
        how = "Set it to null." if row.types.endswith("?") else f"Remove it: ~{row.path}"
        refuse(translation, row.path, value, row.feature, row.reason, how)


def refuse(translation: Translation, path: str, value: Any, feature: str, reason: str, how: str) -> None:
    """Note that a value asks for what is not here."""
    given = "" if isinstance(value, Mapping | list) else f"{shown(value)} asks for "
    translation.problems[path] = f"{given}{feature}, not supported here: {reason}. {how}"


def _read_key_of_teacher(translation: Translation, path: str, value: Any) -> None:
    """The teacher is built like the student; what describes its training otherwise has no effect."""
    _, section, *_ = path.split(".")
    inner = Translation({}, ())
    own = path.removeprefix("teacher.")
    read = read_section(inner, _nested(own, value), "policy", section_at(["policy"]))
    for place, text in inner.problems.items():
        there = f"teacher.{place.removeprefix('policy.')}"
        if text.startswith("unknown") or NOT_ALLOWED in text:
            translation.problems[there] = text
    given = dict(nodes({own: value}))
    if isinstance(eight_bits := given.get("megatron_cfg.fp8_cfg"), Mapping):
        translation.honoured[_FP8_OF_TEACHER] = eight_bits
    for key in _WIDE_LAYERS:
        if f"megatron_cfg.{key}" in given:
            translation.honoured[f"teacher.megatron_cfg.{key}"] = given[f"megatron_cfg.{key}"]
    if own in ("hf_config_overrides", "megatron_cfg.model_overrides") and value:
        how = "Write them into the config.json of the teacher's folder, and set this to null."
        refuse(translation, path, value, "another config.json", "a teacher is as its folder says", how)
    if own == "quant_cfg" and value is not None:
        reason = "a teacher's weights are as its folder has them"
        refuse(translation, path, value, "quantization of a teacher", reason, "Set it to null.")
    for place, inner_value in nodes(read):
        is_another_value = inner_value is None or place in _OTHER_VALUES
        if not is_another_value and (wrong := _wrong_type(place, inner_value)) is not None:
            translation.problems[f"teacher.{place}"] = wrong
    if read or inner.without_effect or inner.honoured or inner.problems:
        translation.without_effect[f"teacher.{section}"] = "the teacher has the student's layout and settings"


def _eight_bits_of_a_teacher(translation: Translation) -> None:
    if not isinstance(given := translation.honoured.get(_FP8_OF_TEACHER), Mapping):
        return
    section = section_at(["policy", "megatron_cfg"])
    defaults = defaults_of(section_at(["policy", "megatron_cfg", "fp8_cfg"]))
    own = translation.get(f"{MEGATRON}.fp8_cfg") or {}
    student, teacher = ({**defaults, **{key: each[key] for key in defaults if key in each}} for each in (own, given))
    both = teacher["enabled"] and student["enabled"]
    pairs = {f"{_FP8_OF_TEACHER}.{key}": (student[key], teacher[key]) for key in (defaults if both else ("enabled",))}
    for key in _WIDE_LAYERS if both else ():
        default = defaults_of(section)[key]
        own_value = translation.get(f"{MEGATRON}.{key}")
        path = f"teacher.megatron_cfg.{key}"
        pairs[path] = (default if own_value is None else own_value, translation.honoured.get(path, default))
    if both and not any(value for path in pairs if path.endswith(_WIDE_LAYERS[0]) for value in pairs[path]):
        for key in _WIDE_LAYERS[1:]:  # without effect
            del pairs[f"teacher.megatron_cfg.{key}"]
    for path, (of_student, of_teacher) in pairs.items():
        if of_student != of_teacher:
            reason, how = "a teacher is computed as the student", f"Set it to {shown(of_student)}."
            refuse(translation, path, of_teacher, "FP8 unlike the student's", reason, how)


def _wrong_type(path: str, value: Any) -> str | None:
    """What is wrong with a value of a key that the schema has below `policy`; None for nothing, or for a section."""
    annotation = section_at(["policy", *path.split(".")])
    if annotation is None or (is_typeddict(annotation) and isinstance(value, Mapping)):
        return None
    try:
        _adapter(path).validate_python(value)
    except ValidationError:
        return f"{shown(value)} {NOT_ALLOWED}{describe(annotation)}."
    return None


@cache
def _adapter(path: str) -> TypeAdapter[Any]:
    return TypeAdapter(section_at(["policy", *path.split(".")]), config=ConfigDict(strict=True))


def _nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: _nested(rest, value) if rest else value}


def unknown_key(path: str, algorithm: object = None) -> str:
    """What to say of a key that neither this project nor NeMo-RL has, in a configuration of `algorithm`."""
    section, _, key = path.rpartition(".")
    annotation = section_at(section.split(".")) if section else full_schema()
    names = [*keys_of(annotation), *keys_in(section)]
    if key in names:  # with its dots it is one key of a file
        nested = ": {".join(path.split(".")) + ": ..." + "}" * path.count(".")
        return f"a file nests its sections. Write {nested}"
    is_here = OTHER_NAMES.get(key, "").rpartition(".")[0] == section
    return f"unknown key.{(not is_here and nearest(key, names)) or right_place(key, annotation, algorithm)}"


def shown(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _backend(translation: Translation) -> None:
    path = "policy.generation.backend"
    name, known = translation.get(path), keys_of(keys_of(keys_of(full_schema())["policy"])["generation"])["backend"]
    if isinstance(name, str) and name in _ENGINES and f"'{name}'" not in str(known):
        translation.problems[path] = (
            f"{shown(name)} asks for generation by {_ENGINES[name]}, not supported here: vLLM generates, or "
            "Megatron-Core in workers laid out like the training workers. Set it to vllm or megatron."
        )
        translation.set(path, "megatron")


def _engines(translation: Translation) -> None:
    variables = "policy.generation.vllm_cfg.env_vars"
    if isinstance(given := translation.get(variables), Mapping):
        as_text = {name: str(each) if type(each) in (int, float) else each for name, each in given.items()}
        translation.set(variables, as_text, variables)


def _metric(translation: Translation) -> None:
    path = "checkpointing.metric_name"
    if (metric := _METRICS.get(str(translation.get(path)))) is not None:
        translation.set(path, metric, path)


def _validation(translation: Translation) -> None:
    for algorithm in ("grpo", "sft", "dpo", "distillation"):
        path = f"{algorithm}.val_period"
        if translation.get(path) == -1:
            translation.set(path, 0, path)
        batches, size = (
            translation.honoured.get(f"{algorithm}.{key}") for key in ("val_batches", "val_global_batch_size")
        )
        if (batches is None) != (size is None):
            given, lacking = ("val_batches", "val_global_batch_size")[:: 1 if size is None else -1]
            translation.problems[f"{algorithm}.{given}"] = (
                f"says how many samples a validation has together with {algorithm}.{lacking} alone. Give both, or "
                f"{algorithm}.max_val_samples."
            )
        if (
            isinstance(batches, int)
            and isinstance(size, int)
            and _is_default(translation, f"{algorithm}.max_val_samples")
        ):
            samples = batches * size if batches > 0 else ALL_SAMPLES
            translation.set(f"{algorithm}.max_val_samples", samples, f"{algorithm}.val_batches")


def _all_of_a_validation(translation: Translation) -> None:
    for algorithm in ("grpo", "distillation"):
        for key in ("max_val_samples", "val_batch_size"):
            path = f"{algorithm}.{key}"
            if path in translation.given and translation.get(path) is None:
                translation.set(path, ALL_SAMPLES, path)


_VERIFIED, _CHOICES = "env.math", ("english_multichoice", "multilingual_multichoice")
_VERIFIERS: Mapping[str, Mapping[str, str]] = {
    "verifier_type": {
        _VERIFIED.partition(".")[2]: "symbolic",
        **{name: name for name in _CHOICES},
    },
    "math_verify_impl": {"hf_math_verify": "symbolic", "dapo_math_verify": "dapo"},
}
"""NeMo-RL's names, by its keys, for values of `env.math.comparison`."""
ALL_SAMPLES = 1 << 40
"""More than there are."""


def _advantages(translation: Translation) -> None:
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        source = f"grpo.adv_estimator.{key}"
        if source in translation.honoured and isinstance(translation.get(f"grpo.{key}"), bool):
            translation.set(f"grpo.{key}", translation.honoured[source], source)


ESTIMATORS = {
    "opd": ("on-policy distillation within GRPO", "distillation has an algorithm of its own"),
    "gae": ("PPO", "there is no value model"),
    "raw_reward": ("rewards as advantages", "rewards are compared, or normalized"),
}
"""NeMo-RL's other values of `grpo.adv_estimator.name`: the feature that each is, and why it is not here."""


def _estimator(translation: Translation) -> None:
    path = "grpo.adv_estimator.name"
    name = translation.get(path)
    if isinstance(name, str) and name in ESTIMATORS:
        feature, reason = ESTIMATORS[name]
        refuse(translation, path, name, feature, reason, "Set it to grpo, gdpo or reinforce_plus_plus.")
    is_refused = isinstance(name, str) and name in ESTIMATORS
    if is_refused or any(problem.endswith(".env_name") for problem in translation.problems):
        translation.set(path, "grpo")  # of another environment's rewards nothing is known


def _verifier(translation: Translation) -> None:
    given = {key: translation.honoured.get(f"env.math.{key}") for key in ("verifier_type", "math_verify_impl")}
    for key, value in given.items():
        path, known = f"env.math.{key}", _VERIFIERS[key]
        if value is None:
            continue
        if value not in known:
            translation.problems[path] = f"{shown(value)} {NOT_ALLOWED}{', '.join(known)}.{nearest(value, known)}"
        elif key == "math_verify_impl" and given["verifier_type"] in _CHOICES:
            translation.without_effect[path] = "env.math.verifier_type says it"
        elif _is_default(translation, "env.math.comparison"):
            translation.set("env.math.comparison", known[value], path)


def _reference(translation: Translation) -> None:
    path = "grpo.skip_reference_policy_logprobs_calculation"
    if translation.honoured.get(path) and translation.get("loss_fn.reference_policy_kl_penalty"):
        translation.problems[path] = (
            "true is not allowed while loss_fn.reference_policy_kl_penalty is above 0, which needs them. Set that to "
            "0, or this to false."
        )


def _differences(translation: Translation) -> None:
    """What a recipe's values mean a little otherwise, said once."""
    algorithm = translation.get("algorithm")
    if not translation.is_recipe or algorithm not in ("grpo", "distillation"):
        return
    says_otherwise = any(
        translation.get(f"loss_fn.{key}") for key in ("use_on_policy_kl_approximation", "use_kl_in_reward")
    )
    if algorithm == "grpo" and translation.get("loss_fn.reference_policy_kl_penalty") and not says_otherwise:
        translation.warnings.append(
            "loss_fn.reference_policy_kl_penalty: the gradient is that of the estimate alone; NeMo-RL adds that of "
            "sampling, as loss_fn.use_on_policy_kl_approximation=true does here (docs/from-nemo-rl.md)."
        )
    sizes = [
        translation.get(path)
        for path in (
            f"{algorithm}.num_prompts_per_step",
            f"{algorithm}.num_generations_per_prompt",
            "policy.train_global_batch_size",
        )
    ]
    if all(type(size) is int and size > 0 for size in sizes) and (updates := sizes[0] * sizes[1] // sizes[2]) > 1:
        translation.warnings.append(
            f"{MEGATRON}.scheduler: counts updates, of which a step has {updates}; NeMo-RL counts steps. For the same "
            f"schedule, multiply lr_warmup_iters and lr_decay_iters by {updates}."
        )


def _lengths_of_records(translation: Translation) -> None:
    path, total = "data.max_input_seq_length", translation.get("policy.max_total_sequence_length")
    given = translation.get(path)
    is_less = type(given) is int and type(total) is int and given < total
    if (
        translation.is_recipe
        and translation.get("algorithm") in ("sft", "dpo")
        and path in translation.given
        and is_less
    ):
        reason = "records are cut at policy.max_total_sequence_length, and none is left out"
        refuse(translation, path, given, "a limit for whole records", reason, f"Set it to {total}.")


def _asynchronous_checkpoints(translation: Translation) -> None:
    source, path = f"{MEGATRON}.checkpoint.async_save", "checkpointing.is_async"
    if source in translation.honoured and _is_default(translation, path):
        translation.set(path, translation.honoured[source], source)


def _is_default(translation: Translation, path: str) -> bool:
    *sections, key = path.split(".")
    return bool(translation.get(path) == defaults_of(section_at(sections)).get(key))


def _overrides_of_the_model(translation: Translation) -> None:
    for key in ("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"):
        source = f"{MEGATRON}.{key}"
        if (value := translation.honoured.get(source)) is not None:
            translation.set(f"{MEGATRON}.model_overrides.{key}", value, source)


def _further_tokens(translation: Translation) -> None:
    """NeMo-RL's base has keys of multi-token prediction for any model; with one that has none, nothing is asked."""
    try:
        there = parse_model_shape(read_model_config(str(translation.get("policy.model_name")))).shape.num_mtp_layers
    except ConfigError:  # which a rule reports
        return
    path = f"{MEGATRON}.mtp_num_layers"
    wanted = translation.get(path)
    if not translation.is_recipe or (wanted is not None and (type(wanted) is not int or wanted != there)):
        return
    translation.set(path, None)
    for key in (f"{MEGATRON}.mtp_loss_scaling_factor", f"{MEGATRON}.mtp_detach_heads") if not there else ():
        if isinstance(value := translation.get(key), int | float):
            translation.set(key, None)
            if value:
                translation.without_effect[key] = "the model predicts no further tokens"


def _flex_dispatcher(translation: Translation) -> None:
    """NeMo-RL's older switch of its library, and what it tells the newer one."""
    dispatcher, backend = f"{MEGATRON}.moe_token_dispatcher_type", f"{MEGATRON}.moe_flex_dispatcher_backend"
    is_flex, switch = translation.get(dispatcher) == "flex", f"{MEGATRON}.moe_enable_deepep"
    if translation.honoured.get(switch):
        if not is_flex or translation.get(backend) not in (None, "deepep"):
            other = (backend, "null") if is_flex else (dispatcher, "flex")
            translation.problems[switch] = (
                f"true is not allowed while {other[0]} is {shown(translation.get(other[0]))}. Set that to {other[1]}, "
                "or this to false."
            )
        else:
            translation.set(backend, "deepep", switch)
    for key, place in _OF_HYBRIDEP.items():
        source, path = f"{MEGATRON}.{key}", f"{MEGATRON}.{place}"
        if (value := translation.honoured.get(source)) is None:
            continue
        if not is_flex or translation.get(backend) != "hybridep":
            translation.without_effect[source] = f"read with {backend} hybridep alone"
        elif translation.get(path) is None:
            translation.set(path, value if place.startswith("model_") else str(int(value)), source)


_OF_HYBRIDEP = {
    "moe_hybridep_num_sms": "model_overrides.moe_flex_dispatcher_num_sms",
    "hybridep_num_ranks_per_nvlink_domain": "env_vars.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "hybridep_use_mnnvl": "env_vars.USE_MNNVL",
}


def _overrides_of_the_folder(translation: Translation) -> None:
    source = "policy.hf_config_overrides"
    given = translation.get(source)
    if given is None:
        translation.set(source, {})
    elif isinstance(given, Mapping) and isinstance(loss := given.get("router_aux_loss_coef"), int | float):
        translation.set(f"{MEGATRON}.moe_aux_loss_coeff", loss, source)
        translation.set(source, {key: value for key, value in given.items() if key != "router_aux_loss_coef"})


def _packing(translation: Translation) -> None:
    """Names that nothing reads where packing is off."""
    path = "policy.sequence_packing.algorithm"
    if translation.is_recipe and translation.get("policy.sequence_packing.enabled") is False:
        translation.without_effect[path] = "policy.sequence_packing.enabled is false"
        translation.set(path, defaults_of(section_at(["policy", "sequence_packing"]))["algorithm"])


def _of_other_switches(translation: Translation) -> None:
    """Values that NeMo-RL does not read, or that mean nothing, while another key has its value."""
    if not translation.is_recipe:
        return
    ddp = f"{MEGATRON}.distributed_data_parallel_config"
    for path, idle, other, needed in (
        (f"{ddp}.overlap_param_gather", False, f"{ddp}.overlap_grad_reduce", True),
        (f"{MEGATRON}.moe_flex_dispatcher_backend", None, f"{MEGATRON}.moe_token_dispatcher_type", "flex"),
        ("checkpointing.checkpoint_must_save_by", None, "checkpointing.enabled", True),
    ):
        if translation.get(path) not in (None, idle) and translation.get(other) != needed:
            translation.set(path, idle)
            translation.without_effect[path] = f"{other} is {shown(translation.get(other))}"


def _limits(translation: Translation) -> None:
    path = "policy.megatron_cfg.optimizer.clip_grad"
    if translation.get(path) is None:  # no limit
        translation.set(path, 0.0, path)
    tensor, sequence = (
        translation.get(f"{MEGATRON}.{key}") for key in ("tensor_model_parallel_size", "sequence_parallel")
    )
    if translation.is_recipe and tensor == 1 and sequence is True:
        translation.set(f"{MEGATRON}.sequence_parallel", False)
        translation.without_effect[f"{MEGATRON}.sequence_parallel"] = "there is one tensor-parallel rank"


STEPS: tuple[Callable[[Translation], Any], ...] = (
    _backend,
    _engines,
    _eight_bits_of_a_teacher,
    _metric,
    _validation,
    _all_of_a_validation,
    _advantages,
    _estimator,
    _verifier,
    _reference,
    _asynchronous_checkpoints,
    _overrides_of_the_folder,
    _overrides_of_the_model,
    _further_tokens,
    _flex_dispatcher,
    _packing,
    _of_other_switches,
    _limits,
    _lengths_of_records,
    _differences,
)
