"""Runs a part of a layer and keeps nothing of it but its input; backward runs it again for what it and its users saved.

Mechanism. `recomputed` runs a function inside hooks that put the number of each saved tensor in its place. Who uses the
output does so inside `Recomputed.users`, where a tensor on the output's storage becomes a handle likewise. The first
handle that backward comes to, a user's, runs the function again from its input, and every handle then takes what that
run saved under its number; each is handed out once, so that memory goes as backward comes along. The input is saved
apart, as any operator saves it: a region around the call can keep it on the host.

Rejected: a checkpoint around the whole MLP (`recompute_modules: [mlp]`), which runs the second linear again, whose
output nobody needs. Megatron-Core's `CheckpointWithoutOutput`, which runs it again from a hook of a later tensor's
gradient: of several users of the output, that has to be the one that backward comes to first.
A node whose backward goes through the graph of the second run: it holds the output and its gradient until the
end of that.

Limits: no random numbers inside the function, and the same tensors are saved in the same order by every run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

type _Handle = tuple["_Again", int, torch.Size, tuple[int, ...], int]
"""A run's tensor by its number, the output being number -1; size, stride and offset in elements."""

_OUTPUT = -1


class _Input(torch.autograd.Function):
    """Saves its input, of any shape, as an operator does. Its output is only the place to find it, to which backward
    never comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> None:
        raise AssertionError("nobody uses its output")


class _Again:
    """Runs of a function on the same input, of any shape. Alive as long as a handle is."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._function = function
        self._place: Tensor = _Input.apply(x)  # type: ignore[no-untyped-call]
        self._num_saved = 0
        self._saved: dict[int, Tensor] = {}

    def first_run(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self._pack, _unpack):
            return self._function(x)

    def _pack(self, tensor: Tensor) -> _Handle | Tensor:
        if isinstance(tensor, Parameter):
            return tensor
        self._num_saved += 1
        return self.handle(tensor, self._num_saved - 1)

    def handle(self, tensor: Tensor, number: int) -> _Handle:
        return self, number, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def take(self, number: int) -> Tensor:
        """What a run saved under a number, once; asked for again, by a second backward, there is another run."""
        if number not in self._saved:
            self._run_again()
        return self._saved.pop(number)

    def _run_again(self) -> None:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Parameter):
                saved.append(tensor.detach())
            return tensor.detach()

        node: Any = self._place.grad_fn
        (x,) = node.saved_tensors
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._function(x.detach().requires_grad_())
        assert len(saved) == self._num_saved, "the function saves other tensors when it runs again"
        self._saved = dict(enumerate(saved)) | {_OUTPUT: output.detach()}


def _unpack(handle: _Handle | Tensor) -> Tensor:
    """The saved tensor, of any shape, that a handle stands for."""
    if isinstance(handle, Tensor):
        return handle
    again, number, size, stride, offset = handle
    return again.take(number).as_strided(size, stride, offset)


class Recomputed:
    """What `recomputed` returns: `output`, of any shape, and the context in which it is used."""

    def __init__(self, output: Tensor, again: _Again | None) -> None:
        self.output = output
        self._again, self._key = again, output.untyped_storage()._cdata

    def users(self) -> saved_tensors_hooks:
        """To be entered around the operator that saves the output for its own backward, once."""
        again, key = self._again, self._key

        def pack(tensor: Tensor) -> _Handle | Tensor:
            if again is None or tensor.untyped_storage()._cdata != key:
                return tensor
            return again.handle(tensor, _OUTPUT)

        return saved_tensors_hooks(pack, _unpack)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Recomputed:
    """Run `function` on `x` (any shape and dtype) and keep nothing but `x`, saved for backward as any operator does.

    The output must have a storage of its own. Where `x` needs no gradient, the function is simply run.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return Recomputed(function(x), None)
    again = _Again(function, x)
    return Recomputed(again.first_run(x), again)
