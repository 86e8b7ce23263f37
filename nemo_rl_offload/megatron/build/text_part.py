"""The weights of a multimodal folder: its text part's by the names of text models, and the others as they are.

Bridge, the comparison of names and the exchange of weights see the folder of a text model (`specs/multimodal.py` says
by what names). The others are neither loaded nor built; an export copies them, bit for bit, under the folder's own
names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.multimodal import TextPart, is_of_tower, text_name

if TYPE_CHECKING:
    from megatron.bridge.models.hf_pretrained.state import StateSource


class TextWeights:
    """Which weights of a folder are its text part's; `folder` reads all of them.

    Raises:
        ConfigError: two weights have the same name in a text model.
    """

    def __init__(self, folder: "StateSource", part: TextPart, path: object) -> None:
        self._folder = folder
        names = folder.get_all_keys()
        self._others = [name for name in names if is_of_tower(part, name)]
        self._names: dict[str, str] = {}
        for name in sorted(set(names) - set(self._others)):
            if (other := self._names.setdefault(text_name(name), name)) != name:
                raise ConfigError(
                    f"policy.model_name: {path}: {other} and {name} are both {text_name(name)} of its text part. Keep "
                    "the one that is to be trained."
                )

    def source(self) -> "StateSource":
        """The text part's weights, as Bridge reads those of a text model."""
        from megatron.bridge.models.hf_pretrained.state import StateSource

        names, folder = self._names, self._folder

        class TextSource(StateSource):  # type: ignore[misc]
            def get_all_keys(self) -> list[str]:
                return sorted(names)

            def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
                found = folder.load_tensors([names[key] for key in keys])
                return {key: found[names[key]] for key in keys}

        return TextSource()

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The folder's weights by its own names: those of the text part from `weights`, the others as they are."""
        text = {self._names[name]: weight for name, weight in weights.items()}
        return {**self._folder.load_tensors(self._others), **text}
