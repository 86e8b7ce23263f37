"""A pickle makes plain values and what a table allows; whatever else it asks for is refused, and nothing of it runs."""

import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from patience import within_patience

from nemo_rl_offload.megatron.checkpoint.restricted_pickle import (
    ForbiddenNameError,
    Function,
    Record,
    UnreadableError,
    check_extent,
    unpickle,
)

WITH_BYTES = (1.5, float("inf"), "text", "é", "x" * 300, b"bytes", b"y" * 300)
"""Those of protocol 2 call a codec."""
VALUES: list[Any] = [
    None,
    [True, False],
    {"a": [1, -1, 255, 256, 65535, 65536, 1 << 31, -(1 << 31), 1 << 200, -(1 << 200)]},
    WITH_BYTES,
    [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
    {2: {None: "none"}, 1.5: "float", True: "bool"},
    [list(range(3000)), {str(number): number for number in range(3000)}],
]


@pytest.mark.parametrize(
    ("value", "protocol"),
    [(value, protocol) for value in VALUES for protocol in (2, 3, 4, 5) if (protocol, value) != (2, WITH_BYTES)],
)
def test_plain_values_are_what_they_were(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    found, end = unpickle(b"before" + data + b"behind", {}, start=6)
    assert (found, repr(found)) == (value, repr(value))
    assert end == 6 + len(data)


def gadgets(canary: Path) -> list[bytes]:
    text = f"touch {canary}".encode()
    argument = b"X" + struct.pack("<I", len(text)) + text
    name = b"cposix\nsystem\n"
    return [
        name + argument + b"\x85R.",
        b"\x8c\x05posix\x8c\x06system\x93" + argument + b"\x85R.",
        b"(" + argument + b"iposix\nsystem\n.",
        b"(" + name + argument + b"o.",
        name + argument + b"\x85\x81.",
        name + argument + b"\x85}\x92.",
        b"cbuiltins\ngetattr\n.",
        b"ccollections\nOrderedDict\nN.",
        b"ccollections\nOrderedDict.__init__\n.",
        b"c__builtin__\neval\n.",
        b"\x82\x01.",
        b"Pid\n.",
        argument + b"Q.",
    ]


@pytest.mark.parametrize("number", range(13))
def test_code_is_refused_and_does_not_run(number: int, tmp_path: Path) -> None:
    data = gadgets(tmp_path / "canary")[number]
    table = {"collections.Counter": Function(OrderedDict)}
    with pytest.raises((ForbiddenNameError, UnreadableError)) as caught:
        unpickle(data, table)
    if data[:1] == b"c":
        assert str(caught.value) == b".".join(data[1:].split(b"\n")[:2]).decode()
    assert list(tmp_path.iterdir()) == []


def test_the_attack_is_one(tmp_path: Path) -> None:
    pickle.loads(gadgets(tmp_path / "canary")[0])
    assert (tmp_path / "canary").exists(), "python's own unpickler runs it"


class Point:
    """What a table may have."""

    x: int


def fill(point: Point, content: Any) -> None:
    if content.keys() != {"x"}:
        raise UnreadableError("no point")
    point.x = content["x"]


def test_a_table_says_what_is_made() -> None:
    point = Point()
    point.x = 3
    table = {f"{__name__}.Point": Record(Point, fill), "collections.OrderedDict": Function(lambda: OrderedDict())}
    found, _ = unpickle(pickle.dumps([point, OrderedDict(a=1)]), table)
    assert isinstance(found, list)
    assert (type(found[0]), found[0].x, found[1]) == (Point, 3, OrderedDict(a=1))


@pytest.mark.parametrize(
    "program",
    [
        b"ca\nPoint\nN}\x86b.",  # the state of the table's own entry
        b"ca\nPoint\n)R.",  # an entry of a class is not called
        b"ca\nf\n)\x81.",  # nor one of a function instantiated
        b"ca\nPoint\n)\x81}X\x01\x00\x00\x00yK\x01sb.",  # a field that it does not have
        b"ca\nf\nN}X\x01\x00\x00\x00yK\x01s\x86b.",
        b"ca\nf\nK\x01\x85R.",  # arguments that it does not take
        b"}]K\x01s.",  # a list as a key
        b"})K\x01s.",
        b"\x8f.",
        b"N\x85e.",
        b")a.",
        b"NN.",
        b"(N.",
        b".",
        b"",
        b"]",
        b"h\x07.",
        b"X\xff\xff\xff\xffabc.",
        b"\x8b\xff\xff\xff\x7f.",
        b"B\xff\xff\xff\x7f.",
        b"X\x01\x00\x00\x00\xff.",
        b"Nr\xff\xff\xff\x7f0j\xfe\xff\xff\x7f.",
        b"}(K\x01u.",
        b"ca\xff\nf\n.",
        b"\x93.",
        b"K\x01K\x02\x93.",
    ],
)
def test_nonsense_is_refused_at_once(program: bytes) -> None:
    with within_patience(), pytest.raises((UnreadableError, ForbiddenNameError)):
        unpickle(program, {"a.Point": Record(Point, fill), "a.f": Function(lambda: 1)})


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_beginning_and_every_other_byte_ends_in_a_value_or_one_error(protocol: int) -> None:
    data = pickle.dumps([VALUES[1], {"a": [1, 256, 1 << 31, -(1 << 200), 1.5, "x", (1, 2, 3, 4)]}], protocol)
    for position in range(len(data)):
        changes = [data[:position], *(data[:position] + bytes([byte]) + data[position + 1 :] for byte in range(256))]
        for changed in changes:
            try:
                unpickle(changed, {})
            except (UnreadableError, ForbiddenNameError):
                continue


def test_a_huge_value_of_few_parts_is_refused() -> None:
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(UnreadableError, match="more than 10000000 values"):
        check_extent(unpickle(pickle.dumps(value), {})[0])
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(UnreadableError, match="nested more than 64 levels"):
        check_extent(unpickle(pickle.dumps(itself), {})[0])
    with pytest.raises(UnreadableError, match="nested more than 64 levels"):
        check_extent(unpickle(b"]" * 100_000 + b"a" * 99_999 + b".", {})[0])
    check_extent([[1] * 1000] * 1000)
