"""Which layers stand in which stage of a pipeline, in Megatron-Core's notation: `pipeline_model_parallel_layout`.

`Et*3|(tt|)*28L` lists the stages in the order of the forward pass, with `|` between them: `E` is the embedding, `t` a
layer, `m` a head that predicts a further token, `L` the loss. `x*n` and `(...)*n` repeat; commas are for the eye. With
virtual stages a rank takes every `pipeline_model_parallel_size`-th one. The notation is that of
`megatron.core.transformer.pipeline_parallel_layer_layout`, which a test compares with this.
"""

import re
from collections.abc import Iterator
from itertools import groupby

from nemo_rl_offload.errors import ConfigError

KEY = "pipeline_model_parallel_layout"
SECTION = "policy.megatron_cfg"
PIPELINE, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
MEANINGS = {"E": "embedding", "t": "layer", "m": "head that predicts a further token", "L": "loss"}
MAX_REPEATS = 1000
MAX_LENGTH = 20_000
_REPEATS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def stages_of(text: str) -> tuple[str, ...]:
    """The letters of each stage.

    Raises:
        ConfigError: a letter that there is not, or parentheses that do not fit; without the key's path.
    """

    def repeat(found: re.Match[str]) -> str:
        number = int(found.group(2)) if len(found.group(2)) < len(str(MAX_REPEATS)) else MAX_REPEATS
        if number >= MAX_REPEATS:
            raise ConfigError(f"repeats {found.group(1)!r} {found.group(2)[:12]} times. Write fewer.")
        return found.group(1) * number

    expanded = text.replace(",", "")
    for pattern in _REPEATS:
        expanded = re.sub(pattern, repeat, expanded)
        if len(expanded) > MAX_LENGTH:
            raise ConfigError(f"stands for more than {MAX_LENGTH} letters. Write fewer.")
    if unknown := sorted(set(expanded) - {*MEANINGS, "|"}):
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in MEANINGS.items())
        raise ConfigError(f"{''.join(unknown)!r} stands for nothing. Write stages of {known}, like 'Et*3|(tt|)*4L'.")
    return tuple(expanded.split("|"))


def layers_of_stages(text: str) -> tuple[int, ...]:
    """Layers of each stage, in the order of the forward pass."""
    return tuple(stage.count("t") for stage in stages_of(text))


def even_stages(num_layers: int, num_stages: int, num_mtp_layers: int = 0) -> str:
    """Stages whose layers differ by one at most; those with one less stand at the ends, where embedding and loss are.

    `num_stages` is 2 or more, and no more than `num_layers`.
    """
    share, num_larger = divmod(num_layers, num_stages)
    first_larger = 1 if num_larger < num_stages - 1 else 0
    is_larger = [first_larger <= stage < first_larger + num_larger for stage in range(num_stages)]
    first, *middle, last = (_repeated("t", share + larger) for larger in is_larger)
    runs = [(text, len(list(equal))) for text, equal in groupby(middle)]
    between = "".join(f"({text}|)*{number}" if number > 1 else f"{text}|" for text, number in runs)
    return f"E{first}|{between}{last}{_repeated('m', num_mtp_layers)}L"


def _repeated(letter: str, number: int) -> str:
    return letter * number if number < 3 else f"{letter}*{number}"


def layout_problems(
    text: str, *, num_layers: int, num_mtp_layers: int, pipeline: int, virtual: int | None
) -> Iterator[str]:
    """What is wrong with a layout, without the key's path."""
    try:
        stages = stages_of(text)
    except ConfigError as error:
        yield str(error)
        return
    letters = "".join(stages)
    for letter, is_at_its_end, where in (
        ("E", stages[0].startswith("E"), "begin"),
        ("L", stages[-1].endswith("L"), "end"),
    ):
        if letters.count(letter) != 1 or not is_at_its_end:
            yield f"{letter}, the {MEANINGS[letter]}, stands once, and the layout must {where} with it."
    for letter, number in (("t", num_layers), ("m", num_mtp_layers)):
        if (found := letters.count(letter)) != number:
            other = "" if letter == "t" or found else ", or set mtp_num_layers to 0, which leaves them out"
            yield f"has {found} of {letter} ({MEANINGS[letter]}), and the model has {number}. Write {number}{other}."
    if "m" in "".join(stages[:-1]):
        yield "heads (m) in a stage without the loss are not supported here. Write them before L in the last stage."
    elif "t" in letters.partition("m")[2]:
        yield "layers (t) come before the heads (m). Write them so."
    if len(stages) != pipeline * (virtual or 1):
        of_virtual = f" x {VIRTUAL} {virtual}" if virtual else ""
        said = (
            f"has {len(stages)} stages, and {PIPELINE} is {pipeline}{of_virtual}. There must be {pipeline} stages, or "
            f"a multiple of that with {VIRTUAL}, which is then how many times."
        )
        yield f"{said} {_stages_remedy(len(stages), num_layers, num_mtp_layers, pipeline)}"


def _stages_remedy(num_stages: int, num_layers: int, num_mtp_layers: int, pipeline: int) -> str:
    """Values that belong together: those of the stages that are there, or of as even ones of the nearest number."""
    if pipeline > num_layers:
        return f"Lower {PIPELINE}, to {num_layers} at most."
    times = max(1, min(round(num_stages / pipeline), num_layers // pipeline))
    virtual = f"{SECTION}.{VIRTUAL}={times if times > 1 else 'null'}"
    if num_stages == times * pipeline:
        return f"Set {virtual}."
    stages = even_stages(num_layers, times * pipeline, num_mtp_layers)
    return f"As even as can be: {virtual} {stages_override(stages)}"


def stages_override(stages: str) -> str:
    """The key and its value as an override, quoted for a shell and for Hydra."""
    return f"'{SECTION}.{KEY}=\"{stages}\"'"
