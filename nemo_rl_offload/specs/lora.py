"""LoRA (arXiv 2106.09685): which linears of a model get an adapter, by Megatron's names, and how large those are.

An adapter adds `alpha / dim * B(A(x))` to a linear of a frozen model. Targets are names, as in Megatron-Bridge: the
last part of a module's path (`linear_qkv`), or a pattern of the whole path with `*`. A layer's number in a pattern
counts the layers of the whole model, in any pipeline; Bridge matches each stage's own numbers.

Megatron has one linear for queries, keys and values, and one for gate and up. Bridge knows two forms of adapters there:
one of the fused linear, whose parts share an A (`linear_qkv`, `linear_fc1`), and the canonical form with an adapter for
each part, as peft has them (`linear_q`, `linear_k`, `linear_v`, `linear_fc1_gate`, `linear_fc1_up`). The names choose
the form. A Mamba-2 layer has two linears, `in_proj` and `out_proj`, and a hybrid model's MLP has no gate: one adapter
each, here and in peft.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from nemo_rl_offload.errors import nearest
from nemo_rl_offload.specs.hybrid_layers import ATTENTION, EXPERTS, MAMBA, MLP
from nemo_rl_offload.specs.model_shape import ModelShape

PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
}
"""Fused linears, and the names of their parts in the canonical form."""
PROJECTIONS: Mapping[str, str] = {
    "self_attn.q_proj": "linear_q",
    "self_attn.k_proj": "linear_k",
    "self_attn.v_proj": "linear_v",
    "self_attn.o_proj": "linear_proj",
    "mlp.gate_proj": "linear_fc1_gate",
    "mlp.up_proj": "linear_fc1_up",
    "mlp.down_proj": "linear_fc2",
}
"""Of a layer without experts, by transformers' names, with Megatron's."""
HYBRID_PROJECTIONS: Mapping[str, Mapping[str, str]] = {
    MAMBA: {"in_proj": "in_proj", "out_proj": "out_proj"},
    ATTENTION: {f"{name}_proj": f"linear_{'proj' if name == 'o' else name}" for name in "qkvo"},
    MLP: {"up_proj": "*.mlp.linear_fc1", "down_proj": "*.mlp.linear_fc2"},
    EXPERTS: {
        "shared_experts.up_proj": "*.shared_experts.linear_fc1",
        "shared_experts.down_proj": "*.shared_experts.linear_fc2",
        "experts.up_proj": "*.experts.linear_fc1",
        "experts.down_proj": "*.experts.linear_fc2",
    },
}
"""Of each kind of layers of a hybrid model, by names of NVIDIA's own code for transformers, with Megatron's."""
HEAD = "output_layer"
_OTHER_NAMES = {**PROJECTIONS, "lm_head": HEAD}
_ADAPTER = ".adapter."
LATENT_LINEARS = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
"""Of latent attention; they get no adapter here."""


def is_adapter(parameter: str) -> bool:
    """Whether a parameter, by its name in Megatron's model, is an adapter's."""
    return _ADAPTER in parameter


class Linear(NamedTuple):
    """A linear of the whole model. Sizes are counts of elements."""

    path: str
    """Megatron's, such as decoder.layers.3.mlp.linear_fc1."""
    inputs: int
    outputs: tuple[int, ...]
    """Of each of its parts, where it has parts."""
    splits_inputs: bool
    """Whether tensor-parallel ranks share its inputs; they share its outputs otherwise."""
    is_of_experts: bool
    layer: int
    """Counted from 0; those that predict further tokens come after the others, and the output layer behind all."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts."""
        return PARTS.get(self.name, ()) if len(self.outputs) > 1 else ()


class Adapters(NamedTuple):
    """What a configuration says of adapters, as far as their sizes go."""

    targets: tuple[str, ...]
    excluded: tuple[str, ...]
    dim: int
    experts_share: bool = True
    """Whether all experts of a layer share an adapter; each has its own otherwise."""


class Adapted(NamedTuple):
    """A linear with the names of its parts that have an adapter each; none: one adapter for the whole."""

    linear: Linear
    parts: tuple[str, ...]


def linears(shape: ModelShape) -> list[Linear]:
    """The linears of a model that can have an adapter."""
    found = []
    paths = [f"decoder.layers.{number}" for number in range(shape.num_layers)]
    paths += [f"mtp.layers.{number}.mtp_model_layer" for number in range(shape.num_mtp_layers)]
    for number, path in enumerate(paths):
        has_experts = shape.layers_with_experts[min(number, shape.num_layers - 1)]
        letter = shape.hybrid_layers[number : number + 1]
        if letter == MAMBA:
            sizes = _of_mamba(shape, path)
        elif letter:
            sizes = _of_attention(shape, path) if letter == ATTENTION else _of_mlp(shape, path, letter == EXPERTS)
        else:
            sizes = chain(_of_attention(shape, path), _of_mlp(shape, path, has_experts))
        found += [Linear(*each, number) for each in sizes]
    return [*found, Linear(HEAD, shape.hidden_size, (shape.vocab_size,), False, False, len(paths))]


_Sizes = Iterator[tuple[str, int, tuple[int, ...], bool, bool]]


def _of_mamba(shape: ModelShape, path: str) -> _Sizes:
    """The first gives a gate, the input of the scan, what writes and reads the state, and the steps."""
    assert shape.mamba is not None, "a hybrid model"
    h, inner = shape.hidden_size, shape.mamba.num_heads * shape.mamba.head_dim
    of_groups = 2 * shape.mamba.num_groups * shape.mamba.state_dim
    yield f"{path}.self_attention.in_proj", h, (2 * inner + of_groups + shape.mamba.num_heads,), False, False
    yield f"{path}.self_attention.out_proj", inner, (h,), True, False


def _of_attention(shape: ModelShape, path: str) -> _Sizes:
    h = shape.hidden_size
    if not shape.has_latent_attention:
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        outputs = tuple(number * shape.head_dim for number in heads)
        yield f"{path}.self_attention.linear_qkv", h, outputs, False, False
    yield f"{path}.self_attention.linear_proj", shape.num_attention_heads * shape.value_head_dim, (h,), True, False


def _of_mlp(shape: ModelShape, path: str, has_experts: bool) -> _Sizes:
    h, num_parts = shape.hidden_size, 1 if shape.hybrid_layers else 2
    mlps = [("mlp", shape.ffn_hidden_size, False)]
    if has_experts and shape.experts is not None:
        mlps = [("mlp.experts", shape.experts.ffn_hidden_size, True)]
        if shape.experts.shared_ffn_hidden_size:
            mlps.append(("mlp.shared_experts", shape.experts.shared_ffn_hidden_size, False))
    for name, width, is_of_experts in mlps:
        yield f"{path}.{name}.linear_fc1", h, (width,) * num_parts, False, is_of_experts
        yield f"{path}.{name}.linear_fc2", width, (h,), True, is_of_experts


def is_named(path: str, pattern: str) -> bool:
    """Whether a pattern means a module: its name, or its whole path with `*` for any text."""
    expression = ".*".join(re.escape(text) for text in pattern.split("*"))
    return path.rpartition(".")[2] == pattern or re.fullmatch(expression, path) is not None


def parts_named(path: str, is_of_experts: bool, targets: Sequence[str], excluded: Sequence[str]) -> set[str] | None:
    """What of a linear gets an adapter: names of its parts, or its own name for the whole; None: nothing.

    Without targets, every linear does that is not excluded and none of the experts', as in Bridge.
    """
    if not targets:
        is_left = not is_of_experts and not any(is_named(path, pattern) for pattern in excluded)
        return {path.rpartition(".")[2]} if is_left else None
    name = path.rpartition(".")[2]
    before = path.removesuffix(name)
    found: set[str] = set()
    for target in targets:
        is_whole = is_named(path, target)
        found |= {name} if is_whole else {part for part in PARTS.get(name, ()) if is_named(f"{before}{part}", target)}
    return found or None


def adapted(shape: ModelShape, targets: Sequence[str], excluded: Sequence[str]) -> list[Adapted]:
    """The linears that get adapters, of a model and targets in which `target_problems` finds nothing."""
    found = []
    for linear in linears(shape):
        names = parts_named(linear.path, linear.is_of_experts, targets, excluded)
        if names is not None:
            found.append(Adapted(linear, tuple(part for part in linear.parts if part in names)))
    return found


def target_problems(shape: ModelShape, targets: Sequence[str], excluded: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What of targets cannot be honoured for a model: the key, and a message that ends with the fix."""
    if targets and excluded:
        yield "exclude_modules", "excludes nothing beside target_modules. Empty one of the two."
        return
    there = linears(shape)
    if shape.tied_embeddings and parts_named(HEAD, False, targets, excluded):
        asking = next((target for target in targets if is_named(HEAD, target)), "an empty list, which means all,")
        how = "Name other modules" if targets else f"Name the modules, or add {HEAD} to exclude_modules"
        yield (
            "target_modules",
            f"{asking} asks for LoRA of a tied output layer, not supported here: {HEAD} has the embedding's weight in "
            f"this model (tie_word_embeddings), and an adapter merged into it would change both. {how}.",
        )
        return
    if not targets and shape.has_latent_attention:
        yield "target_modules", f"an empty list means {', '.join(LATENT_LINEARS)} too. {_only(there)}"
        return
    if not targets and not any(parts_named(each.path, each.is_of_experts, targets, excluded) for each in there):
        yield "exclude_modules", "leaves no linear for an adapter. Exclude less."
    for target in targets:
        yield from _problems_of(shape, there, target)
    for pattern in excluded:
        if not any(is_named(linear.path, pattern) for linear in there):
            known = {linear.name for linear in there}
            yield "exclude_modules", f"{pattern} matches nothing in the model.{nearest(pattern, known)} {_only(there)}"
    for linear in there:
        names = parts_named(linear.path, linear.is_of_experts, targets, excluded) if targets else None
        if names is None or names == {linear.name}:
            continue
        if linear.name in names:
            yield "target_modules", f"{linear.path} gets adapters as {' and '.join(sorted(names))}. Name one of them."
        elif linear.is_of_experts:
            yield (
                "target_modules",
                f"experts have one adapter for {linear.name}, not for its parts. Name {linear.name}.",
            )
        elif not linear.parts:
            yield "target_modules", f"{linear.path} has no parts in this model. Name {linear.name}."
        else:
            continue
        return


def _problems_of(shape: ModelShape, there: list[Linear], target: str) -> Iterator[tuple[str, str]]:
    def means(path: str) -> bool:
        name = path.rpartition(".")[2]
        before = path.removesuffix(name)
        return any(is_named(f"{before}{each}", target) for each in (name, *PARTS.get(name, ())))

    latent = [f"decoder.layers.0.self_attention.{name}" for name in LATENT_LINEARS] if shape.latent_attention else []
    if not_here := [path for path in latent if is_named(path, target)]:
        yield "target_modules", f"{target}: {not_here[0].rpartition('.')[2]} gets no adapter here. {_only(there)}"
    elif not any(means(linear.path) for linear in there):
        known = {name for linear in there for name in (linear.name, *PARTS.get(linear.name, ()))}
        last = target.rpartition(".")[2]
        theirs = [ours for name, ours in _OTHER_NAMES.items() if name.rpartition(".")[2] == last]
        hint = f" Megatron-Core's name of it is {theirs[0]}." if theirs else nearest(target, known)
        yield "target_modules", f"{target} matches nothing in the model.{hint} {_only(there)}"


def _only(there: list[Linear]) -> str:
    names = ", ".join(dict.fromkeys(linear.name for linear in there))
    parts = ", ".join(dict.fromkeys(part for linear in there for part in linear.parts))
    return f"There are {names}, and for each part {parts}." if parts else f"There are {names}."


def adapter_parameters(one: Adapted, dim: int, tensor: int = 1) -> int:
    """Elements of a linear's adapters on one of so many tensor-parallel ranks.

    Bridge splits A's rows and B's, or A's columns and B's rows where ranks share the inputs.
    """
    linear = one.linear
    if not one.parts:
        return dim * (linear.inputs + sum(linear.outputs)) // (1 if linear.is_of_experts else tensor)
    sizes = dict(zip(PARTS[linear.name], linear.outputs, strict=True))
    return sum(dim * (linear.inputs + sizes[part]) for part in one.parts) // tensor
