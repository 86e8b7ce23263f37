"""Which calls of a model a listed name stands for.

An entry is a path of a module, where `*` stands for any part of one step and `**` for any number of steps, or one of
Megatron's names. Names are resolved in layers of transformers' usual shapes, a norm before each of two parts:

    tokens are mixed:   attention (Llama, Mistral, Qwen, Gemma, gpt-oss, CLIP, SigLIP, ...),
                        a gated delta net (Qwen3-Next, Qwen3.5), Mamba-2 (Bamba, Nemotron-H)
    then each by itself: a dense MLP, or experts in one module

A layer of Nemotron-H or Mamba-2 has one of the two. Of a delta net or Mamba-2, `qkv_linear` is the projection into it,
`core_attn` all between its projections, and `attn_proj` the projection out of it.

A part that `checkpoint_wrapper` wraps is found by the path that it has without.

What Megatron opens inside a fused function lies here between two submodules: attention proper from the projections to
the one out of it, the activation from `gate_proj` and `up_proj` to `down_proj`. Experts are one function; its only seam
is `_apply_gate`, a method that all of transformers' implementations call except `eager`.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from torch import nn

from nemo_rl_offload.errors import ConfigError, nearest

NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "expert_fc1", "moe_act")
"""Megatron's names that can be resolved."""

_NORMS = ("input_layernorm", "layer_norm1", "norm1", "norm")
_MIXERS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    ("self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj"),
    ("attn", ("qkv",), "proj"),
    ("linear_attn", ("in_proj_qkvz", "in_proj_ba"), "out_proj"),
    ("linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"),
    ("mamba", ("in_proj",), "out_proj"),
    ("mixer", ("in_proj",), "out_proj"),
    ("mixer", ("q_proj", "k_proj", "v_proj"), "o_proj"),
)
"""Modules that mix tokens, the projections into each, and the one out of it."""
_MLP_NORMS = (
    *("pre_feedforward_layernorm", "pre_ff_layernorm", "pre_mlp_layernorm", "post_attention_layernorm"),
    *("layer_norm2", "norm2"),
)
_MLPS = tuple(
    (container, gates, end)
    for container in ("mlp", "feed_forward", "mixer")
    for gates, end in (
        (("gate_proj", "up_proj"), "down_proj"),
        (("fc1",), "fc2"),
        (("linear_fc1",), "linear_fc2"),
        (("up_proj",), "down_proj"),
    )
)
"""Dense MLPs, in the same way."""
_EXPERTS = ("mlp.experts", "feed_forward.experts", "mixer.experts")
_GATE_METHOD = "_apply_gate"
_WRAPPED = "_checkpoint_wrapped_module"
"""Of `torch.distributed.algorithms._checkpoint`."""

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
    modules = _modules(model)
    layers = _layers(modules)
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
    modules = _modules(model)
    layers = _layers(modules)
    found = {name: _by_name(name, modules, layers) for name in NAMES}
    names = [name for name, targets in found.items() if targets and not _why_not(name, targets, {}, modules)]
    if not names:
        raise ConfigError(f"'auto': {_why_none(NAMES[0], modules, [])}")
    return names


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """By path; what is inside of a wrapper also by its path without the wrapper's step."""
    modules = dict(model.named_modules())
    for path, module in list(modules.items()):
        modules.setdefault(path.replace(f".{_WRAPPED}", ""), module)
    return modules


def _by_path(entry: str, modules: dict[str, nn.Module]) -> list[Target]:
    if not entry:  # torch's name of the model itself
        return []
    steps = (re.escape(part).replace(r"\*\*", ".*").replace(r"\*", r"[^.]*") for part in entry.split("."))
    pattern = re.compile(r"\.".join(steps))
    found = {id(module): Site(path, module) for path, module in modules.items() if pattern.fullmatch(path)}
    return [Target(entry, site) for site in found.values()]


def _by_name(entry: str, modules: dict[str, nn.Module], layers: Iterable[str]) -> list[Target]:
    return [target for layer in layers for target in _in_layer(entry, modules, layer)]


def _layers(modules: dict[str, nn.Module]) -> list[str]:
    """Paths of the modules that have a norm and a part after it."""
    return [
        path for path in modules if _first(modules, path, _NORMS) and (_mixer(modules, path) or _mlp(modules, path))
    ]


def _mixer(modules: dict[str, nn.Module], layer: str) -> list[Site]:
    """The module that mixes tokens, the projections into it, the one out of it; nothing where there is none."""
    return _part(modules, layer, _MIXERS)


def _mlp(modules: dict[str, nn.Module], layer: str) -> list[Site]:
    """The same of a dense MLP."""
    return _part(modules, layer, _MLPS)


def _part(modules: dict[str, nn.Module], layer: str, kinds: Iterable[tuple[str, tuple[str, ...], str]]) -> list[Site]:
    for container, projections, end in kinds:
        paths = [_join(layer, container), *(_join(layer, f"{container}.{child}") for child in (*projections, end))]
        if all(path in modules for path in paths):
            return [Site(path, modules[path]) for path in paths]
    return []


def _first(modules: dict[str, nn.Module], layer: str, children: Iterable[str]) -> list[Site]:
    paths = (_join(layer, child) for child in children)
    return [Site(path, modules[path]) for path in paths if path in modules][:1]


def _in_layer(entry: str, modules: dict[str, nn.Module], layer: str) -> list[Target]:
    mixer, mlp = _mixer(modules, layer), _mlp(modules, layer)
    experts = _first(modules, layer, _EXPERTS)
    match entry:
        case "attn_norm":
            found = _first(modules, layer, _NORMS) if mixer else []
        case "qkv_linear":
            found = mixer[1:-1]
        case "core_attn":
            return _between(entry, mixer)
        case "attn_proj":
            found = mixer[-1:]
        case "mlp_norm":
            found = _first(modules, layer, _MLP_NORMS if mixer else _NORMS)
        case "mlp_fc1":
            found = mlp[1:-1]
        case "mlp_act":
            return _between(entry, mlp)
        case _:
            return [target for site in experts for target in _in_experts(entry, site)]
    return [Target(entry, site) for site in found]


def _between(entry: str, part: list[Site]) -> list[Target]:
    """All of a part but the projections into it, as far as the one out of it."""
    if not part:
        return []
    whole = part[0]._replace(module=getattr(part[0].module, _WRAPPED, part[0].module))
    return [Target(entry, whole, tuple(part[1:-1]), part[-1])]


def _in_experts(entry: str, experts: Site) -> list[Target]:
    if not hasattr(type(experts.module), _GATE_METHOD):
        return []
    gate = experts._replace(method=_GATE_METHOD)
    return [Target(entry, gate)] if entry == "moe_act" else [Target(entry, experts, end=gate)]


def _why_none(entry: str, modules: dict[str, nn.Module], layers: Sequence[str]) -> str:
    if entry in NAMES and not layers:
        return (
            "this model has no decoder layers with self_attn.q_proj, k_proj, v_proj and o_proj between two norms, nor "
            "any other that is known. "
            "Give paths of modules instead, like 'encoder.layers.*'"
        )
    if entry in NAMES:
        return _NEEDS.get(entry, "no layer of this model has it in a form that is known; give paths of modules instead")
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
