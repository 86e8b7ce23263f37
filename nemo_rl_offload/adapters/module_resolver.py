"""Which calls of a model a listed name stands for.

An entry is a path of a module, where `*` stands for any part of one step and `**` for any number of steps, or one of
Megatron's names. Names are resolved in decoder layers of transformers' usual shape (Llama, Mistral, Qwen2, Qwen3,
Qwen3-MoE, Gemma 1 to 3, and whatever else has it):

    input_layernorm
    self_attn: q_proj, k_proj, v_proj, o_proj
    post_attention_layernorm or, beside it, pre_feedforward_layernorm
    mlp: gate_proj, up_proj, down_proj, or experts in one module

What Megatron opens inside a fused function lies here between two submodules: attention proper from the projections to
`o_proj`, the activation from `gate_proj` and `up_proj` to `down_proj`. Experts are one function; its only seam is
`_apply_gate`, a method that all of transformers' implementations call except `eager`.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from torch import nn

from nemo_rl_offload.errors import ConfigError, nearest

NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "expert_fc1", "moe_act")
"""Megatron's names that can be resolved."""

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER = ("input_layernorm", *_PROJECTIONS, "self_attn.o_proj", "post_attention_layernorm", "mlp")
_GATES = ("mlp.gate_proj", "mlp.up_proj")
_EXPERTS = "mlp.experts"
_GATE_METHOD = "_apply_gate"

_NEEDS = {
    "mlp_fc1": "no layer has a dense MLP (mlp.gate_proj, mlp.up_proj); name expert_fc1 for experts",
    "mlp_act": "no layer has a dense MLP (mlp.gate_proj, mlp.up_proj, mlp.down_proj); name moe_act for experts",
    "expert_fc1": "no layer has experts in one module (mlp.experts); name mlp_fc1 for dense layers",
    "moe_act": "no layer has experts in one module (mlp.experts); name mlp_act for dense layers",
}


class Site(NamedTuple):
    """A method of a module of the model."""

    path: str
    module: nn.Module
    method: str = "__call__"

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.method


class Target(NamedTuple):
    """The calls whose saved tensors `entry` stands for: those of `site`, from its beginning to the call of `end`
    where there is one, without the calls of `without`."""

    entry: str
    site: Site
    without: tuple[Site, ...] = ()
    end: Site | None = None


def resolve(model: nn.Module, entries: Sequence[str]) -> list[Target]:
    """Return what `entries` stand for in `model`. Raises ConfigError with all problems, one per line: an entry that
    matches nothing, one that has no seam in this model, one listed twice, one inside of compiled code."""
    if isinstance(entries, str) or not entries or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"modules={entries!r}: give a list with at least one name, like ['core_attn', 'mlp_norm']")
    modules = dict(model.named_modules())
    layers = [path for path in modules if all(_join(path, child) in modules for child in _LAYER)]
    targets: list[Target] = []
    listed: dict[Target, str] = {}
    problems: list[str] = []
    for entry in dict.fromkeys(entries):
        found = _by_name(entry, modules, layers) if entry in NAMES else _by_path(entry, modules)
        problem = _why_none(entry, modules, layers) if not found else _why_not(entry, found, listed, modules)
        if problem:
            problems.append(f"'{entry}': {problem}")
        targets += found
        listed |= {target._replace(entry=""): entry for target in found}
    if problems:
        raise ConfigError("\n".join(problems))
    return targets


def names_in(model: nn.Module) -> list[str]:
    """Those of `NAMES` that this model has. Raises ConfigError when there is none."""
    modules = dict(model.named_modules())
    layers = [path for path in modules if all(_join(path, child) in modules for child in _LAYER)]
    found = {name: _by_name(name, modules, layers) for name in NAMES}
    names = [name for name, targets in found.items() if targets and not _why_not(name, targets, {}, modules)]
    if not names:
        raise ConfigError(f"'auto': {_why_none(NAMES[0], modules, [])}")
    return names


def _by_path(entry: str, modules: dict[str, nn.Module]) -> list[Target]:
    if not entry:  # torch's name of the model itself
        return []
    steps = (re.escape(part).replace(r"\*\*", ".*").replace(r"\*", r"[^.]*") for part in entry.split("."))
    pattern = re.compile(r"\.".join(steps))
    return [Target(entry, Site(path, module)) for path, module in modules.items() if pattern.fullmatch(path)]


def _by_name(entry: str, modules: dict[str, nn.Module], layers: Iterable[str]) -> list[Target]:
    return [target for layer in layers for target in _in_layer(entry, modules, layer)]


def _in_layer(entry: str, modules: dict[str, nn.Module], layer: str) -> list[Target]:
    def sites(*children: str) -> list[Site]:
        paths = [_join(layer, child) for child in children]
        return [Site(path, modules[path]) for path in paths] if all(path in modules for path in paths) else []

    def between(container: str, without: tuple[str, ...], end: str) -> list[Target]:
        found = sites(container, *without, end)
        return [Target(entry, found[0], tuple(found[1:-1]), found[-1])] if found else []

    match entry:
        case "attn_norm":
            found = sites("input_layernorm")
        case "qkv_linear":
            found = sites(*_PROJECTIONS)
        case "core_attn":
            return between("self_attn", _PROJECTIONS, "self_attn.o_proj")
        case "attn_proj":
            found = sites("self_attn.o_proj")
        case "mlp_norm":
            found = sites("pre_feedforward_layernorm") or sites("post_attention_layernorm")
        case "mlp_fc1":
            found = sites(*_GATES)
        case "mlp_act":
            return between("mlp", _GATES, "mlp.down_proj")
        case _:
            return [target for experts in sites(_EXPERTS) for target in _in_experts(entry, experts)]
    return [Target(entry, site) for site in found]


def _in_experts(entry: str, experts: Site) -> list[Target]:
    if not hasattr(type(experts.module), _GATE_METHOD):
        return []
    gate = experts._replace(method=_GATE_METHOD)
    return [Target(entry, gate)] if entry == "moe_act" else [Target(entry, experts, end=gate)]


def _why_none(entry: str, modules: dict[str, nn.Module], layers: Sequence[str]) -> str:
    if entry in NAMES and not layers:
        return (
            "this model has no decoder layers with self_attn.q_proj, k_proj, v_proj and o_proj between two norms. "
            "Give paths of modules instead, like 'encoder.layers.*'"
        )
    if entry in NAMES:
        return _NEEDS[entry]
    if "." not in entry and "*" not in entry:
        return f"neither a module of this model nor one of {', '.join(NAMES)}." + nearest(entry, [*NAMES, *modules])
    patterns = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in modules if path)
    near = get_close_matches(entry, patterns, n=3, cutoff=0.4)
    return "matches no module of this model." + (f" Nearest: {', '.join(near)}" if near else "")


def _why_not(entry: str, found: list[Target], listed: dict[Target, str], modules: dict[str, nn.Module]) -> str:
    for target in found:
        if entry in ("expert_fc1", "moe_act") and _implementation(target.site.module) == "eager":
            return (
                f"{target.site.path} computes its experts in one loop (experts_implementation='eager'). Choose "
                f"another, model.set_experts_implementation('grouped_mm'), or list '{target.site.path}' as a whole"
            )
        other = listed.get(target._replace(entry=""))
        if other is not None:
            return f"{target.site.path} is listed as '{other}' too"
        compiled = _compiled_around(target, modules)
        if compiled is not None:
            whole = f"List what is compiled as a whole ('{compiled}')" if compiled else "Compile single layers"
            return f"{target.site.path} is inside of compiled code, where nothing can be told apart. {whole} instead"
    return ""


def _implementation(experts: nn.Module) -> str | None:
    implementation: str | None = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return implementation


def _compiled_around(target: Target, modules: dict[str, nn.Module]) -> str | None:
    """The path of the compiled module that has the target's seams inside; None if there is none."""
    steps = target.site.path.split(".") if target.site.path else []
    whole_call = target.end is None and target.site.method == "__call__"
    for length in range(len(steps) + (not whole_call)):
        module = modules[".".join(steps[:length])]
        if module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable"):
            return ".".join(steps[:length])
    return None


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child
