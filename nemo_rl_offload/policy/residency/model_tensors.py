"""What a model has on its device: weights, gradients, and its optimizer's state and main weights."""

from collections.abc import Iterable

from torch import Tensor

from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.policy.residency.gradients import gradient_tensors
from nemo_rl_offload.policy.residency.kept_weights import lasting_tensors


def weight_tensors(model: MegatronModel, arena: HostArena) -> list[Tensor]:
    """Parameters and lasting buffers on the arena's device."""
    return [each for each in lasting_tensors(model.modules) if _is_on_device(each, arena)]


def optimizer_tensors(model: MegatronModel, arena: HostArena) -> list[Tensor]:
    """Main weights that are none of the model's, and state, as far as it exists by now; on the arena's device."""
    if model.optimizer is None:
        return []
    of_model = {each.untyped_storage().data_ptr() for each in lasting_tensors(model.modules)}
    chained = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    optimizers = [each.optimizer for each in chained if each.optimizer is not None]
    main_weights = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
    state = [value for each in optimizers for values in each.state.values() for value in values.values()]
    return [
        each
        for each in (*main_weights, *state)
        if isinstance(each, Tensor) and _is_on_device(each, arena) and each.untyped_storage().data_ptr() not in of_model
    ]


def resident_bytes(model: MegatronModel, arena: HostArena) -> dict[str, int]:
    """Device memory of each, in bytes; none of what is not there."""
    sizes = {
        "weights": _storage_bytes(weight_tensors(model, arena)),
        "gradients": _storage_bytes(gradient_tensors(model)),
        "optimizer": _storage_bytes(optimizer_tensors(model, arena)),
    }
    return {name: size for name, size in sizes.items() if size}


def _is_on_device(tensor: Tensor, arena: HostArena) -> bool:
    return tensor.device.type == arena.backend.device.type and tensor.numel() > 0 and not arena.holds(tensor.data_ptr())


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
