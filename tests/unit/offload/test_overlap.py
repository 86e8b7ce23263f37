from nemo_rl_offload.offload.overlap import Visit, fit_overlap


def test_a_group_moves_only_when_it_can_be_let_go_at_one_boundary_and_fetched_at_a_later_one() -> None:
    boundaries = [0.0, 10.0, 20.0, 30.0, 40.0]
    early, late = Visit(0, 40, 5, 5), Visit(10, 30, 5, 5)  # copied out at 5, and at 15
    assert fit_overlap([early, late], boundaries) == [True, False]  # late would have to start back at 25
    assert fit_overlap([late._replace(out_ms=1, in_ms=1, reached_ms=41)], boundaries) == [True]
    busy = [early._replace(out_ms=25), late._replace(reached_ms=44)]  # the link is busy until 25, then until 30
    assert fit_overlap(busy, [*boundaries, 44.0]) == [False, True]  # what stays does not use the link


def test_what_cannot_come_back_behind_another_is_not_worth_moving() -> None:
    """Either has the time alone; the second is wanted first, and the link is not done with it when the first has to
    start. Groups of different forwards do not come back at the same time."""
    boundaries = [float(ms) for ms in range(101)]
    first = Visit(0.0, 100.0, 1.0, 50.0)
    second = Visit(1.0, 60.0, 1.0, 50.0)
    assert fit_overlap([second], boundaries) == [True]
    assert fit_overlap([first, second], boundaries) == [True, False]
    assert fit_overlap([first, second._replace(forward=1)], boundaries) == [True, True]
