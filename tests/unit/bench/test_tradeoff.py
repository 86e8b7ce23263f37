"""The picture of memory against time."""

import warnings
from pathlib import Path

import pytest

from nemo_rl_offload.bench.tradeoff import LOGARITHMIC_FROM, Point, draw_tradeoff

POINTS = [Point("ours", 3 << 30, 110.0, "tab:blue"), Point("none", 5 << 30, 100.0, "black")]


@pytest.mark.parametrize(
    "points",
    [POINTS, [*POINTS, *POINTS], [*POINTS, Point("slow", 1 << 30, 100.0 * LOGARITHMIC_FROM + 1, "red")], []],
    ids=["near", "on each other", "logarithmic", "none"],
)
def test_it_is_drawn_whole(tmp_path: Path, points: list[Point]) -> None:
    path = tmp_path / "picture.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_tradeoff(path, "title", points)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_points_are_numbered_in_the_order_of_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    labels = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda *args, **kwargs: (labels.append(kwargs["label"]), plot(*args, **kwargs))[1]
    )
    draw_tradeoff(tmp_path / "picture.png", "title", POINTS[::-1])
    assert labels == ["1  ours", "2  none"]
