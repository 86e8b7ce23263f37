"""A recipe that NeMo-RL trains with DTensor (FSDP2), trained by Megatron-Core.

The parallel sizes of `policy.dtensor_cfg`, and `policy.optimizer`, `policy.scheduler` and `policy.max_grad_norm` become
keys of `policy.megatron_cfg`. What else that section holds, NeMo-RL does not read then, and exemplars carry whole
sections of it: such values would train something else, such as frozen routers, so they count only where the command
line gives them, or where they are about memory alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_rl_offload.config.nemo_rl.translation import MEGATRON, Translation, refuse, shown
from nemo_rl_offload.config.rules.rule import read_model_config
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.sources import OVERRIDE
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.hybrid_layers import EXPERTS, layer_pattern
from nemo_rl_offload.specs.lora import HEAD, HYBRID_PROJECTIONS, PROJECTIONS
from nemo_rl_offload.specs.model_shape import ModelShape, parse_model_shape

_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "activation_checkpointing": "activation_checkpointing",
}
_ABOUT_MEMORY = (
    *("fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size", "activation_offload"),
    *("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks", "cpu_offloading"),
    *("fine_grained_offloading_max_inflight_offloads", "cpu_offloading_num_layers", "empty_unused_memory_level"),
    *("transformer_impl", "cpu_affinity"),
    *("moe_paged_stash", "moe_paged_stash_page_size", "moe_expert_rank_capacity_factor"),
    *("moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
)
"""Keys of `policy.megatron_cfg` that do not change what is learned."""
_FUSED_ADAM = {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
_OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "torch.optim.AdamW": ("adam", {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}),
    "torch.optim.SGD": ("sgd", {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0}),
    "transformer_engine.pytorch.optimizers.FusedAdam": ("adam", _FUSED_ADAM),
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": ("adam", _FUSED_ADAM),
}
"""Optimizers of PyTorch and Transformer Engine with Megatron-Core's names and their own defaults."""
_WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable", "set_grad_none"), "a way to compute the same"),
    **dict.fromkeys(
        ("master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype"),
        "weights and their averages are float32 in the optimizer",
    ),
}
"""Arguments of optimizers that choose among ways to compute or keep the same, and why they do not count."""
_AS_HERE = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False, "nesterov": False}
"""Further arguments, with the value that Megatron-Core's optimizers have."""
_PREFIX = "torch.optim.lr_scheduler."


def trains_with_dtensor(translation: Translation) -> bool:
    """Whether the recipe is for DTensor."""
    is_on = translation.honoured.get("policy.dtensor_cfg.enabled") is True
    by_megatron = f"{MEGATRON}.enabled" in translation.given and translation.get(f"{MEGATRON}.enabled")
    if is_on and by_megatron:
        translation.problems["policy.dtensor_cfg.enabled"] = (
            f"true is not allowed beside {MEGATRON}.enabled: one of the two trains. Set one of them to false."
        )
    return is_on and not by_megatron


def translate_dtensor(
    translation: Translation, defaults: Mapping[str, Any], origins: Mapping[str, str], num_steps: int | None
) -> None:
    """Put what the recipe's keys for DTensor mean into `policy.megatron_cfg`.

    Args:
        translation: the whole configuration, changed.
        defaults: of the section.
        origins: where each given value was written, by its path.
        num_steps: of the run.
    """
    given = translation.get(MEGATRON)
    if translation.get(f"{MEGATRON}.optimizer.clip_grad") is None and translation.get("policy.max_grad_norm") is None:
        translation.set(f"{MEGATRON}.optimizer.clip_grad", 0.0)
        given = translation.get(MEGATRON)
    try:
        TypeAdapter(MegatronConfig).validate_python(given)
    except ValidationError:  # which is said with the rest of the configuration
        translation.set(f"{MEGATRON}.enabled", True)
        return
    section = {
        key: _kept(given[key], value, f"{MEGATRON}.{key}", origins) if key not in _ABOUT_MEMORY else given[key]
        for key, value in defaults.items()
    }
    unread = [key for key in section if section[key] != given[key]]
    for key in unread:
        translation.without_effect[f"{MEGATRON}.{key}"] = "policy.dtensor_cfg says how the recipe is trained"
    translation.set(MEGATRON, {**section, "enabled": True})

    def put(key: str, value: Any, source: str) -> None:
        path = f"{MEGATRON}.{key}"
        if not is_override(origins.get(path)):
            translation.set(path, value, source)

    for theirs, ours in _SIZES.items():
        source = f"policy.dtensor_cfg.{theirs}"
        if source in translation.honoured:
            put(ours, translation.honoured[source], source)
    if given_vars := translation.honoured.get("policy.dtensor_cfg.env_vars"):
        put("env_vars", {k: v for k, v in given_vars.items() if v != ""} or None, "policy.dtensor_cfg.env_vars")
    if "policy.max_grad_norm" in translation.honoured:
        put("optimizer.clip_grad", translation.honoured["policy.max_grad_norm"] or 0.0, "policy.max_grad_norm")
    for key, value in _optimizer(translation):
        put(f"optimizer.{key}", value, "policy.optimizer")
    for key, value in _scheduler(translation, num_steps):
        put(key, value, "policy.scheduler")
    _experts(translation, put)
    _adapters(translation, put)
    translation.warnings.append(
        "policy.dtensor_cfg: NeMo-RL trains this recipe with DTensor; here Megatron-Core trains it, with its parallel "
        "sizes, its optimizer and its schedule (docs/from-nemo-rl.md)."
    )


def is_override(origin: str | None) -> bool:
    """Whether the command line gives a value, by itself or by a reference."""
    return str(origin).startswith(OVERRIDE)


def _kept(given: Any, default: Any, path: str, origins: Mapping[str, str]) -> Any:
    """The default, with what the command line gives."""
    if is_override(origins.get(path)):
        return given
    if isinstance(default, Mapping) and isinstance(given, Mapping) and default:
        return {key: _kept(given.get(key, value), value, f"{path}.{key}", origins) for key, value in default.items()}
    return default


def _experts(translation: Translation, put: Any) -> None:
    """Experts need sequence parallelism beside tensor parallelism in Megatron-Core; it changes no result."""
    content = _content(translation)
    has_experts = any(content.get(key) for key in _NUM_EXPERTS)
    tensor = translation.get(f"{MEGATRON}.tensor_model_parallel_size")
    if has_experts and isinstance(tensor, int) and tensor > 1:
        put("sequence_parallel", True, "policy.dtensor_cfg.sequence_parallel")


LORA = "policy.dtensor_cfg.lora_cfg"
_INIT = {"xavier": "xavier", "uniform": "kaiming"}


def _adapters(translation: Translation, put: Any) -> None:
    """LoRA, whose modules have transformers' names there."""
    given = {key: translation.honoured.get(f"{LORA}.{key}") for key in _LORA_KEYS}
    if not given["enabled"]:
        return
    for key in ("dim", "alpha", "dropout", "dropout_position"):
        if given[key] is not None:
            put(f"peft.{key}", given[key], f"{LORA}.{key}")
    if (method := given["lora_A_init"]) is not None and method not in _INIT:
        translation.problems[f"{LORA}.lora_A_init"] = f"{shown(method)} is not allowed. Allowed: xavier or uniform."
    elif method is not None:
        put("peft.lora_A_init_method", _INIT[method], f"{LORA}.lora_A_init")
    content = _content(translation)
    modules = _modules(translation, content)
    if modules is None:
        return
    names = _targets(translation, modules, given["match_all_linear"], given["target_modules"], given["exclude_modules"])
    if names is not None:
        put("peft.enabled", True, f"{LORA}.enabled")
        put("peft.target_modules", names, f"{LORA}.target_modules")
        if any(name.startswith("*.experts.") for name in names):  # each is a linear, and has an adapter
            put("peft.share_expert_adapters", False, f"{LORA}.enabled")


def _content(translation: Translation) -> Mapping[str, Any]:
    """What the model's `config.json` holds; nothing where it cannot be read, which a rule reports."""
    try:
        return read_model_config(str(translation.get("policy.model_name")))
    except ConfigError:
        return {}


_LORA_KEYS = (
    *("enabled", "target_modules", "exclude_modules", "match_all_linear", "dim", "alpha", "dropout"),
    *("dropout_position", "lora_A_init"),
)
_KWARGS = "policy.dtensor_cfg.automodel_kwargs"
_ALL_EXPERTS = "experts"
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def _modules(translation: Translation, content: Mapping[str, Any]) -> Sequence[tuple[str, str]] | None:
    """Modules that Automodel's LoRA asks about, by their paths there, with Megatron's names; None: refused.

    These are linears, and a module of experts where a layer has one for all.
    """
    family = content.get("model_type")
    if family == "nemotron_h" and (pattern := layer_pattern(content)):
        if EXPERTS not in pattern or translation.honoured.get(f"{_KWARGS}.force_hf") is True:
            return [*_hybrid_modules(pattern, int(content.get("n_routed_experts", 8))), ("lm_head", HEAD)]
        reason = "its experts have an adapter each in NVIDIA's own code for transformers, and none in Automodel's"
        how = f"Say {_KWARGS}.force_hf=true for the first."
    elif family == "qwen3_moe" or not any(content.get(key) for key in _NUM_EXPERTS):
        return [*_plain_modules(parse_model_shape(content).shape), ("lm_head", HEAD)]
    else:
        reason = f"the adapters of a {family} there were not compared with Megatron-Core's"
        how = f"Train it with megatron_cfg, and set {MEGATRON}.peft."
    refuse(translation, f"{LORA}.enabled", True, "LoRA of a model with experts by DTensor", reason, how)
    return None


def _plain_modules(shape: ModelShape) -> Iterator[tuple[str, str]]:
    of_mlp = {name: ours for name, ours in PROJECTIONS.items() if name.startswith("mlp.")}
    for number, has_experts in enumerate(shape.layers_with_experts):
        path = f"model.layers.{number}."
        yield from ((path + name, ours) for name, ours in PROJECTIONS.items() if name not in of_mlp)
        if has_experts:
            yield f"{path}mlp.experts", _ALL_EXPERTS
        else:
            before = "*.mlp." if shape.has_experts else ""
            yield from ((path + name, before + ours) for name, ours in of_mlp.items())


def _hybrid_modules(pattern: str, num_experts: int) -> Iterator[tuple[str, str]]:
    for number, letter in enumerate(pattern):
        for name, ours in HYBRID_PROJECTIONS[letter].items():
            path = f"backbone.layers.{number}.mixer."
            if name.startswith("experts."):
                each = (name.replace("experts.", f"experts.{expert}.") for expert in range(num_experts))
                yield from ((path + module, ours) for module in each)
            else:
                yield path + name, ours


def _targets(
    translation: Translation,
    modules: Sequence[tuple[str, str]],
    match_all: bool | None,
    targets: list[Any] | None,
    excluded: list[Any] | None,
) -> list[str] | None:
    """Megatron's names of the modules that get an adapter; None where that is refused."""
    key = "match_all_linear" if match_all else "exclude_modules" if excluded and not targets else "target_modules"
    if len(given := [each for each in (match_all, targets, excluded) if each]) > 1:
        translation.problems[f"{LORA}.{key}"] = (
            "is not allowed beside another one of match_all_linear, target_modules and exclude_modules. Give one."
        )
        return None
    patterns = [str(each) for each in targets or excluded or ([] if given else ["*_proj"])]
    last = {path.rpartition(".")[2] for path, _ in modules}
    for pattern in patterns:
        try:
            re.compile(_expression(pattern))
        except re.error as error:
            translation.problems[f"{LORA}.{key}"] = f"{pattern} is no pattern: {error}. Write * for any text."
            return None
        if pattern in last and not any(_is_named(path, [pattern]) for path, _ in modules):
            translation.problems[f"{LORA}.{key}"] = (
                f"{pattern} is no module's whole path, which NeMo-RL compares. Write '*{pattern}' for all of that name."
            )
            return None
    chosen: dict[str, set[bool]] = {}
    for path, ours in modules:
        is_chosen = key == "match_all_linear" or _is_named(path, patterns) == (key == "target_modules")
        chosen.setdefault(ours, set()).add(is_chosen)
    of_all_experts = chosen.pop(_ALL_EXPERTS, set())
    names = [name for name, found in chosen.items() if True in found]
    refused = ""
    if any(len(found) > 1 for found in chosen.values()):
        refused, reason = "LoRA of some layers by DTensor", "its names are translated for all layers alike"
        how = f"Train it with megatron_cfg, and name the layers in {MEGATRON}.peft.target_modules."
    elif True in of_all_experts and key == "target_modules":
        refused, reason = (
            "LoRA of a model with experts by DTensor",
            "which code runs there decides what its experts get",
        )
        how = "Name modules that are none of experts."
    elif "out_proj" in names:
        refused = "LoRA of out_proj by DTensor"
        reason = "the kernel of Mamba-2 layers there reads its weight past the adapter, which learns nothing"
        how = "Add '*out_proj*' to exclude_modules."
    elif not names:
        translation.problems[f"{LORA}.{key}"] = (
            f"{shown(patterns)} leaves no linear for an adapter. There are "
            f"{', '.join(dict.fromkeys(path.rpartition('.')[2] for path, _ in modules))}."
        )
        return None
    if refused:
        refuse(translation, f"{LORA}.{key}", patterns, refused, reason, how)
        return None
    return names


def _is_named(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path matches one, as in Automodel's `module_matcher.py`: `*` is any text, the rest an expression."""
    return path in patterns or any(re.fullmatch(_expression(pattern), path) for pattern in patterns)


def _expression(pattern: str) -> str:
    return re.sub(r"(?<!\.)\*", ".*", pattern)


def _optimizer(translation: Translation) -> Iterator[tuple[str, Any]]:
    """Keys of `megatron_cfg.optimizer` and their values."""
    path = "policy.optimizer"
    optimizer = translation.honoured.get(path)
    if not optimizer:
        return
    name, given = optimizer.get("name"), optimizer.get("kwargs") or {}
    others = sorted(optimizer.keys() - {"name", "kwargs"})
    if others:
        translation.problems[f"{path}.{others[0]}"] = "unknown key. Allowed: name and kwargs."
    if not isinstance(name, str) or name not in _OPTIMIZERS:
        reason, how = f"there are {', '.join(_OPTIMIZERS)}", "Set it to torch.optim.AdamW."
        refuse(translation, f"{path}.name", name, "another optimizer", reason, how)
        return
    if not isinstance(given, Mapping):
        translation.problems[f"{path}.kwargs"] = f"{shown(given)} is not allowed. Allowed: a section of keys."
        return
    megatrons_name, defaults = _OPTIMIZERS[name]
    for key, value in given.items():
        if key in _WITHOUT_EFFECT:
            translation.without_effect[f"{path}.kwargs.{key}"] = _WITHOUT_EFFECT[key]
        elif _AS_HERE.get(key) is value:
            continue
        elif key not in defaults:
            translation.problems[f"{path}.kwargs.{key}"] = (
                f"has nothing that it could become. Allowed: {', '.join(defaults)}. Remove it: ~{path}.kwargs.{key}"
            )
        elif not _is_like(value, defaults[key]):
            translation.problems[f"{path}.kwargs.{key}"] = (
                f"{shown(value)} is not allowed. Allowed: {'two numbers' if key == 'betas' else 'a number'}."
            )
    if any(problem.startswith(path) for problem in translation.problems):
        return
    values = {**defaults, **given}
    yield "optimizer", megatrons_name
    yield "lr", values["lr"]
    yield "weight_decay", values["weight_decay"]
    yield "use_distributed_optimizer", megatrons_name == "adam"
    if megatrons_name == "adam":
        yield "adam_beta1", values["betas"][0]
        yield "adam_beta2", values["betas"][1]
        yield "adam_eps", values["eps"]
    else:
        yield "sgd_momentum", values["momentum"]


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, list):
        return isinstance(value, list) and len(value) == len(default) and all(_is_like(each, 0.9) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scheduler(translation: Translation, num_steps: int | None) -> Iterator[tuple[str, Any]]:
    """Keys of `megatron_cfg` and their values: a linear warm-up, and then a constant, a line or a cosine."""
    path = "policy.scheduler"
    given = translation.honoured.get(path)
    if not given:
        return
    parts: Sequence[Any] = [given] if isinstance(given, Mapping) else given
    phases = [part for part in parts if isinstance(part, Mapping) and "name" in part]
    milestones: list[int] = next(
        (part["milestones"] for part in parts if isinstance(part, Mapping) and "milestones" in part), []
    )
    names = [str(phase["name"]).removeprefix(_PREFIX) for phase in phases]
    arguments = [phase.get("kwargs") or {} for phase in phases]
    lr = translation.get(f"{MEGATRON}.optimizer.lr")
    try:
        found = dict(_phases(names, arguments, list(milestones), float(lr), num_steps))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        refuse(
            translation,
            path,
            given,
            "another schedule",
            f"{what}; there are LinearLR as a warm-up, and behind it ConstantLR, LinearLR or CosineAnnealingLR",
            f"Set it to null, and give {MEGATRON}.scheduler.* on the command line.",
        )
        return
    yield from found.items()


_ARGUMENTS = {
    "LinearLR": {"start_factor", "end_factor", "total_iters"},
    "ConstantLR": {"factor", "total_iters"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
}


def _phases(
    names: list[str], arguments: list[Mapping[str, Any]], milestones: list[int], lr: float, num_steps: int | None
) -> Iterator[tuple[str, Any]]:
    if len(milestones) != max(len(names) - 1, 0) or len(names) > 2 or not names:
        raise ValueError(f"{len(names)} phases with {len(milestones)} milestones")
    for name, kwargs in zip(names, arguments, strict=True):
        if unknown := sorted(set(kwargs) - _ARGUMENTS.get(name, set(kwargs))):
            raise ValueError(f"{unknown[0]} of {name}")
    warmup = 0
    name, kwargs = names[0], arguments[0]
    is_rising = name == "LinearLR" and kwargs.get("start_factor", 1 / 3) < kwargs.get("end_factor", 1.0) == 1.0
    if is_rising:
        warmup = int(kwargs.get("total_iters", 5))
        if milestones and milestones[0] != warmup:
            raise ValueError(f"a warm-up of {warmup} steps with a milestone at {milestones[0]}")
        yield "scheduler.lr_warmup_iters", warmup
        yield "scheduler.lr_warmup_init", kwargs.get("start_factor", 1 / 3) * lr
        names, arguments = names[1:], arguments[1:]
    elif milestones:
        raise ValueError(f"{name} before a milestone")
    if not names:
        return
    name, kwargs = names[0], arguments[0]
    if name == "ConstantLR":
        if kwargs.get("factor", 1 / 3) != 1.0:
            raise ValueError(f"a factor of {kwargs.get('factor', 1 / 3):g}")
        return
    if name == "CosineAnnealingLR":
        length, lowest, style = int(kwargs["T_max"]), float(kwargs.get("eta_min", 0.0)), "cosine"
        if num_steps is not None and num_steps > warmup + length:
            raise ValueError(f"a cosine that rises again after {warmup + length} of {num_steps} steps")
    elif name == "LinearLR":
        if kwargs.get("start_factor", 1 / 3) != 1.0:
            raise ValueError(f"a line from {kwargs.get('start_factor', 1 / 3):g}")
        length, lowest, style = int(kwargs.get("total_iters", 5)), float(kwargs["end_factor"]) * lr, "linear"
    else:
        raise ValueError(name)
    yield "scheduler.lr_decay_style", style
    yield "scheduler.lr_decay_iters", warmup + length
    yield "optimizer.min_lr", lowest
