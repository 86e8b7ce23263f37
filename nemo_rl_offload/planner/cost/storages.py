"""What the formulas of a layer's activations take and give: storages, and what their sizes depend on.

A storage is named by what it holds and knows the modules whose regions save it; it is charged once, to the first of
them that is offloaded.
"""

from collections.abc import Collection
from dataclasses import dataclass

from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

SCALED_BYTES = {"mxfp8": 1 + 1 / 32, "blockwise": 1 + 4 / 128}
"""By recipe, of an element in 8 bits with its share of a scale: a byte for 32 elements (OCP Microscaling Formats 1.0),
or a float32 for 128."""

KEPT = ("no module",)
"""What holds a storage that a copy does not free."""


@dataclass(frozen=True)
class Storage:
    """Memory that one layer's forward pass of one microbatch leaves for its backward pass."""

    name: str
    num_bytes: int
    num_elements: int
    """Of the largest tensor saved on it: what `min_offloaded_tensor_size` is compared with."""
    modules: tuple[str, ...] = ()
    """Modules that save it, in the order in which they are charged; none: it always stays."""
    recomputed_by: tuple[str, ...] = ()
    """The names in `recompute_modules` that would give it up."""
    live: bool = True
    """False: it comes into being only while backward recomputes, and is not offloaded then."""
    held_by: tuple[str, ...] = ()
    """Modules that save it too, before those of `modules`: one that is not offloaded keeps it on the device."""
    only_with: tuple[str, ...] = ()
    """Names in `recompute_modules` without which it does not exist; none: it always does."""
    constant: bool = False
    """The same tensor for all microbatches."""

    def charged_to(self, offloaded: Collection[str], min_elements: int = 0) -> str | None:
        """Return the module whose region copies it out; None when none does."""
        if not self.live or self.num_elements < min_elements:
            return None
        return next((module for module in self.modules if module in offloaded), None)

    def leaves(self, offloaded: Collection[str]) -> bool:
        """Whether copying it out frees device memory. The engine finds out in its first pass, and then leaves it."""
        return all(module in offloaded for module in self.held_by)


@dataclass(frozen=True)
class Tokens:
    """A rank's part of a microbatch."""

    count: int
    """Tokens per microbatch: sequences x length / context-parallel ranks."""
    sequence: int
    """Length of a whole sequence."""


@dataclass(frozen=True)
class Numbers:
    """How values are stored."""

    element_bytes: int = 2
    fp8: str | None = None
    """Recipe of 8 bits in which linears keep their inputs; None: as they are."""
    router_bytes: int = 2
    """Of a router's probability. Only plain operators save those by which they weight experts."""
    has_wide_layers: bool = False
    """Whether first and last layers keep their inputs as they are; all are counted so then, which is more."""

    def linear_input_bytes(self, num_elements: int) -> int:
        """What a linear layer keeps of an input."""
        if self.fp8 is None or self.has_wide_layers:
            return num_elements * self.element_bytes
        return round(num_elements * SCALED_BYTES.get(self.fp8, 1))


@dataclass(frozen=True)
class LayerContext:
    """Everything that a layer's activations depend on."""

    shape: ModelShape
    layout: ParallelLayout
    tokens: Tokens
    numbers: Numbers
    fused_norm_linear: bool = False
    """Transformer Engine's norm+linear in one: its norm has no region of its own, dense MLPs have none at all."""

    @property
    def norm_tokens(self) -> int:
        """Tokens of a norm's input: split by sequence parallelism."""
        return self.tokens.count // (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def hidden_bytes(self) -> int:
        """Of a layer's input, or its output."""
        return self.norm_tokens * self.shape.hidden_size * self.numbers.element_bytes

    @property
    def heads(self) -> int:
        return self.shape.num_attention_heads // self.layout.tensor

    @property
    def groups(self) -> int:
        """Key and value heads; fewer than ranks are replicated."""
        return max(1, self.shape.num_key_value_heads // self.layout.tensor)

    @property
    def projected_width(self) -> int:
        """Of queries, keys and values, and of attention's gate, for a token: what one projection gives."""
        num_heads = self.heads * (2 if self.shape.attention_gate else 1) + 2 * self.groups
        return num_heads * self.shape.head_dim

    @property
    def copies_queries(self) -> bool:
        """Whether queries, and attention's gate, are copied beside each other: of several groups of several heads. They
        are views of what was projected otherwise."""
        return self.heads > self.groups > 1

    @property
    def gathers_keys(self) -> bool:
        """Whether attention keeps keys and values of whole sequences: plain torch gathers them over context-parallel
        ranks, and Transformer Engine passes them around."""
        return self.layout.context > 1 and not self.fused_norm_linear

    @property
    def key_tokens(self) -> int:
        """Tokens whose keys and values attention keeps."""
        return self.tokens.count * (self.layout.context if self.gathers_keys else 1)

    @property
    def expert_tokens(self) -> int:
        """Tokens that this rank's experts take, balanced: each rank receives as many as it sends, whatever EP is, and
        those of all ranks that share its experts."""
        experts = self.shape.experts
        assert experts is not None
        return self.norm_tokens * experts.experts_per_token * self.layout.expert_tensor


def tensor(name: str, elements: int, element_bytes: int, *modules: str, by: tuple[str, ...] = ()) -> Storage:
    """One of so many elements that these modules save, and that recomputation of `by` gives up."""
    return Storage(name, elements * element_bytes, elements, modules, by)


def linear_input(context: LayerContext, name: str, elements: int, *modules: str, by: tuple[str, ...] = ()) -> Storage:
    """The same of what a linear layer reads."""
    return Storage(name, context.numbers.linear_input_bytes(elements), elements, modules, by)
