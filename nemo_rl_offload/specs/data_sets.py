"""Public data sets by NeMo-RL's names: where the hub has them, and which of their columns are prompt and answer.

A data set of the hub is named like a path, `hf://datasets/OWNER/NAME`, perhaps with a folder in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

HUB = "hf://datasets/"


@dataclass(frozen=True)
class DataSet:
    """One data set."""

    hub_id: str
    """`OWNER/NAME`, with the folder of a part behind it where it has parts."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """`prompt`, `answer` or `system`, and where it stands in a record: keys and numbers between dots; behind `####`,
    what stands behind that mark. None: records have a form that is recognized."""
    split: str | None = None
    """Which split is taken where none is said, of several."""
    validation_size: float = 0.0
    """The share for validation where none is said."""

    @property
    def path(self) -> str:
        """As `data.train.path` names it."""
        return HUB + self.hub_id


_PROBLEM = {"prompt": "problem", "answer": "answer"}
_DAPO = {"prompt": "prompt.0.content", "answer": "reward_model.ground_truth"}
_GSM8K = DataSet("openai/gsm8k/main", {"prompt": "question", "answer": "answer####"}, "train")
DATA_SETS: Mapping[str, DataSet] = {
    "OpenMathInstruct-2": DataSet(
        "nvidia/OpenMathInstruct-2", {"prompt": "problem", "answer": "expected_answer"}, "train_1M", 0.05
    ),
    "DeepScaler": DataSet("agentica-org/DeepScaleR-Preview-Dataset", _PROBLEM),
    "DAPOMath17K": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", _DAPO),
    "DAPOMathAIME2024": DataSet("BytedTsinghua-SIA/AIME-2024", _DAPO),
    "AIME2024": DataSet("HuggingFaceH4/aime_2024", _PROBLEM, "train"),
    "AIME2026": DataSet("MathArena/aime_2026", _PROBLEM, "train"),
    "math500": DataSet("HuggingFaceH4/MATH-500", _PROBLEM, "test"),
    "OpenR1-Math-220k": DataSet("open-r1/OpenR1-Math-220k/data", _PROBLEM, "train"),
    "gsm8k": _GSM8K,
    "GSM8K": _GSM8K,
    "squad": DataSet(
        "rajpurkar/squad/plain_text", {"system": "context", "prompt": "question", "answer": "answers.text.0"}, "train"
    ),
    "HelpSteer3": DataSet("nvidia/HelpSteer3/preference", {}, "train"),
    "tulu3_sft_mixture": DataSet("allenai/tulu-3-sft-mixture", {}, "train", 0.05),
    "Tulu3Preference": DataSet("allenai/llama-3.1-tulu-3-8b-preference-mixture", {}, "train"),
    "Nemotron-Cascade-2-SFT-Math": DataSet("nvidia/Nemotron-Cascade-2-SFT-Data/math", {}, None, 0.05),
}
OF_FILES = ("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format", "NemoGymDataset")
"""NeMo-RL's names for files of the user's."""
_BY_PATH = {each.path: each for each in DATA_SETS.values()}


def columns_of(path: str) -> Mapping[str, str]:
    """Where a known data set has prompt and answer, by its path; nothing of any other."""
    return _BY_PATH[path].columns if path in _BY_PATH else {}


def hub_folder(path: str) -> tuple[str, str]:
    """`OWNER/NAME` and the folder in it, of a path below `HUB`."""
    owner, _, rest = path.removeprefix(HUB).strip("/").partition("/")
    name, _, folder = rest.partition("/")
    return f"{owner}/{name}", folder
