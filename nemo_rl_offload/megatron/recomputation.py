"""Runs a part of a layer without saving anything but its input, and again when backward wants its output.

Mechanism. `recomputed` runs a function without grad; its input is saved as any operator's is, by which a region around
the call can keep it on the host. Who uses the output does so inside `Recomputed.users`: where autograd saves a tensor
on the output's storage, it gets a handle instead, and nothing else keeps the output. Backward comes to the users first,
whose handles run the function again, now with grad; the node that the first run left goes through the graph of that.

Rejected: Megatron-Core's `CheckpointWithoutOutput`, which shrinks the output's storage and later puts another one in
its place. It saves its input as a detached leaf that requires grad; autograd keeps the accumulator of a saved leaf,
and that the leaf itself, so that offloading the input frees nothing. Its exchange of storages is a C++ extension that
is compiled when first used. And a checkpoint around the whole MLP runs the second linear again, whose output nobody
needs.

Limits: no random numbers inside the function; gradients of weights are accumulated in the second run's own backward, so
that `torch.autograd.grad` does not see them and is refused. A function whose input needs no gradient is simply run.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

type _Handle = tuple[torch.Size, tuple[int, ...], int] | Tensor
"""A view of the output: size, stride and offset in elements. Or any other saved tensor."""


class _Again:
    """The second run of a function. It begins when the output is wanted, and is forgotten with `backward`; a second
    backward begins a third run. It refers to the first run weakly: the graph owns that, and with it the input."""

    def __init__(self, function: Callable[[Tensor], Tensor], first_run: Any) -> None:
        self._function, self._first_run = function, weakref.ref(first_run)
        self._run: tuple[Tensor, Tensor] | None = None

    def _input_and_output(self) -> tuple[Tensor, Tensor]:
        if self._run is None:
            first_run = self._first_run()
            assert first_run is not None, "its users come after it in the graph"
            (x,) = first_run.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                self._run = x, self._function(x)
        return self._run

    def view(self, size: torch.Size, stride: tuple[int, ...], offset_elements: int) -> Tensor:
        """The output, as one of its users saved it."""
        return self._input_and_output()[1].detach().as_strided(size, stride, offset_elements)

    def backward(self, grad_output: Tensor) -> Tensor | None:
        """The gradient of the input; those of weights are accumulated."""
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "recompute_modules needs .backward(): torch.autograd.grad would miss weights' gradients."
            )
        x, y = self._input_and_output()
        self._run = None
        torch.autograd.backward(y, grad_output)
        return x.grad


class _FirstRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.again = _Again(function, ctx)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None]:
        return ctx.again.backward(grad_output), None


class Recomputed:
    """What `recomputed` returns: `output`, and the context in which it is used."""

    def __init__(self, output: Tensor, again: _Again | None) -> None:
        self.output = output
        self._again, self._key = again, output.untyped_storage()._cdata

    def users(self) -> saved_tensors_hooks:
        """To be entered around everything that saves the output for its own backward."""
        again, key = self._again, self._key

        def pack(tensor: Tensor) -> _Handle:
            if again is None or tensor.untyped_storage()._cdata != key:
                return tensor
            return tensor.size(), tensor.stride(), int(tensor.storage_offset())

        def unpack(handle: _Handle) -> Tensor:
            if isinstance(handle, Tensor):
                return handle
            assert again is not None
            return again.view(*handle)

        return saved_tensors_hooks(pack, unpack)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Recomputed:
    """Run `function` on `x` (any shape and dtype) and keep nothing but `x`, saved for backward as any operator does.

    The output must have a storage of its own.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return Recomputed(function(x), None)
    output = _FirstRun.apply(x, function)  # type: ignore[no-untyped-call]
    return Recomputed(output, output.grad_fn.again)
