import errno

import pytest

from nemo_rl_offload import errors


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError])
def test_mistakes_in_values_are_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)
    assert issubclass(kind, errors.NemoRLOffloadError)


@pytest.mark.parametrize("kind", [errors.CheckpointError, errors.WorkerError, errors.ResourceError])
def test_other_errors_share_only_the_base(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.NemoRLOffloadError)
    assert not issubclass(kind, ValueError)


def test_nearest_names_the_closest() -> None:
    assert errors.nearest("mlp_nrm", ["attn_norm", "mlp_norm"]) == " Did you mean 'mlp_norm'?"


def test_nearest_is_silent_where_nothing_is_close() -> None:
    assert errors.nearest("zzz", ["attn_norm", "mlp_norm"]) == ""
    assert errors.nearest("zzz", []) == ""


def test_room_is_made_where_it_is_what_lacks() -> None:
    full, other = (OSError(number, "") for number in (errno.ENOSPC, errno.ENOTDIR))
    assert errors.where_else(full, "name another") == "Free some space there, or name another."
    assert [errors.where_else(each, "name another") for each in (other, ValueError())] == ["Name another."] * 2


def test_what_several_raise_is_one_error() -> None:
    def fail(kind: type[Exception], text: str) -> int:
        raise kind(text)

    with pytest.raises(errors.DataError, match=r"^one\ntwo$"):
        errors.all_or_none(lambda: 1, lambda: fail(errors.DataError, "one"), lambda: fail(errors.ConfigError, "two"))
    assert errors.all_or_none(lambda: 1, lambda: 2) == [1, 2]
    with pytest.raises(KeyError):
        errors.all_or_none(lambda: fail(KeyError, "ours"))
