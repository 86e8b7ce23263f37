"""Tensors that are never offloaded: parameters, and whatever lies on their storages."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter


class Exclusions:
    """Excluded tensors by identity and by storage. `stale` says that storages may have moved since the last look."""

    def __init__(self) -> None:
        self._tensors: dict[int, weakref.ref[Tensor]] = {}  # by id
        self._storages: set[int] = set()
        self.stale = False

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._tensors[id(tensor)] = weakref.ref(tensor)
            self._storages.add(tensor.untyped_storage()._cdata)

    def covers(self, tensor: Tensor, storage_key: int) -> bool:
        """Whether `tensor`, or what it is a view of, is excluded or lies on an excluded storage; `storage_key` is the
        address of its own. Parameters themselves are the caller's to recognize."""
        if storage_key in self._storages or (id(tensor) in self._tensors and self._is_named(tensor)):
            return True
        base = tensor._base
        if base is None:
            return False
        # To ask whether a plain tensor is a parameter takes as long as all else here, and none is.
        return (type(base) is not Tensor and isinstance(base, Parameter)) or self._is_named(base)

    def refresh(self) -> None:
        """Look up where the excluded tensors are now. Meant for the time between steps, not for each region:
        parameters are many, and a view of one is known by its base in any case."""
        if not self.stale:
            return
        tensors = {key: tensor for key, ref in self._tensors.items() if (tensor := ref()) is not None}
        self._tensors = {key: self._tensors[key] for key in tensors}
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
        self.stale = False

    def _is_named(self, tensor: Tensor) -> bool:
        ref = self._tensors.get(id(tensor))
        return ref is not None and ref() is tensor
