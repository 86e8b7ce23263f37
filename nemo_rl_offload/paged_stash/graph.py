"""A step's forward and backward through experts as one CUDA graph, with the stash inside it.

Buffers of fixed size and counts that stay on the device make every launch of a step the same, so a graph can replay
them: the graph holds the copies into pages and back, and the freelist moves on with every replay. The side stream joins
the capturing one at the step's end (`PagedStash.end_step`). The first step without limits sizes the pools, the second
runs as it is, which compiles kernels and fills the libraries' workspaces, and the third is captured.

What cannot be captured: a step without limits, since the host reads counts there; such a step also makes new pools, and
the graph is captured anew afterwards. A whole training step (`train_step`), because its microbatches change
their shapes and are new tensors each time, and the activation offload engine, whose copies go where the arena has room
at that moment.
"""

from collections.abc import Callable

import torch

from nemo_rl_offload.paged_stash.rerun import StepGuard


class CapturedStep[T]:
    """Calls `attempt` eagerly, and replays it once it is captured; for `StepGuard.run`.

    `attempt` must read its input from the same tensors each time, clear gradients with `set_to_none=False` or not at
    all, and read nothing on the host. Its result's tensors are written anew by every replay.
    """

    def __init__(self, attempt: Callable[[], T], guard: StepGuard) -> None:
        self._attempt, self._guard = attempt, guard
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the last call replayed a graph."""
        return self._graph is not None

    def __call__(self) -> T:
        if not self._guard.capacity.is_limited:
            self._graph, self._result, self._is_warm = None, None, False
            return self._attempt()
        if not self._is_warm:
            self._is_warm = True
            return self._on_side(self._attempt)
        if self._graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._result = self._attempt()
                if self._guard.stash is not None:
                    self._guard.stash.end_step()
            self._graph = graph
        self._graph.replay()
        assert self._result is not None
        return self._result

    @staticmethod
    def _on_side(attempt: Callable[[], T]) -> T:
        """Autograd's accumulators belong to the stream of their first use, which may not be the default one."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = attempt()
        torch.cuda.current_stream().wait_stream(stream)
        return result
