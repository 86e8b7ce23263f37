"""Activation offloading inside transformers' `Trainer`, and trainers built on it, as TRL's."""

from collections.abc import Sequence

from torch import nn
from transformers import TrainerCallback

from nemo_rl_offload.adapters.torch_modules import ActivationOffload, offload_activations
from nemo_rl_offload.offload.stats import OffloadStats


class OffloadCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Offloads the model's activations from the beginning of training to its end.

    Takes what `offload_activations` takes, without the model:
    `Trainer(..., callbacks=[OffloadCallback(["core_attn"])])`.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        host_memory_budget: float | str = 0.5,
        min_tensor_bytes: int = 1 << 20,
        gpu_memory_budget: str | None = None,
    ) -> None:
        self._modules = modules
        self._host_memory_budget = host_memory_budget
        self._min_tensor_bytes = min_tensor_bytes
        self._gpu_memory_budget = gpu_memory_budget
        self._offload: ActivationOffload | None = None

    def on_train_begin(self, args: object, state: object, control: object, model: nn.Module, **_: object) -> None:
        """Begin; what a training that failed has left is ended first.

        Raises ValueError where the trainer would train copies of the model, or offloads by itself.
        """
        self.close()
        is_quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        if getattr(args, "n_gpu", 1) > 1 and not is_quantized:  # those the trainer does not copy
            raise ValueError(
                "OffloadCallback cannot offload under nn.DataParallel, which Trainer uses when one process sees "
                "several GPUs: it trains copies of the model, not the model. Launch with `torchrun --nproc-per-node N` "
                "(or `accelerate launch`), or let the process see one GPU: CUDA_VISIBLE_DEVICES=0."
            )
        if getattr(args, "activation_offloading", False):
            raise ValueError(
                "TRL's activation_offloading=True and OffloadCallback move the same tensors: set "
                "activation_offloading=False, or leave the callback out."
            )
        self._offload = offload_activations(
            model,
            self._modules,
            host_memory_budget=self._host_memory_budget,
            min_tensor_bytes=self._min_tensor_bytes,
            gpu_memory_budget=self._gpu_memory_budget,
        )

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Tell the engine, which learns from whole steps."""
        assert self._offload is not None
        self._offload.end_step()

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """End."""
        self.close()

    def stats(self) -> OffloadStats:
        """Totals of the latest training."""
        return OffloadStats() if self._offload is None else self._offload.stats()

    def close(self) -> None:
        """End offloading. Needed only after a training that failed, when no other follows."""
        if self._offload is not None:
            self._offload.close()
