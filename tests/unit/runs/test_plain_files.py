"""What others put at a name is neither followed, nor waited for, nor overwritten."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.runs.plain_files import (
    Place,
    aside_of,
    make_folder,
    open_to_append,
    open_to_append_lines,
    read_plain,
    written_anew,
)
from nemo_rl_offload.specs.plain_file import NotPlainError

VICTIM = "somebody's"


pytestmark = pytest.mark.usefixtures("never_waits")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(VICTIM)
    return path


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        server.bind(path.name)
        os.chdir(before)


STRANGE: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a link to nowhere": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "a link to a pipe": lambda path, victim: (os.mkfifo(victim.with_name("fifo")), path.symlink_to("../fifo")),
    "a link to a folder": lambda path, victim: path.symlink_to(victim.parent),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": lambda path, _: put_socket(path),
    "a folder": lambda path, _: path.mkdir(),
}


def put(kind: str, tmp_path: Path, victim: Path) -> tuple[Path, list[str]]:
    """Something strange in a folder of its own, and what is beside that folder."""
    path = tmp_path / "run" / "name"
    path.parent.mkdir()
    STRANGE[kind](path, victim)
    return path, sorted(os.listdir(tmp_path))


def read(path: Path) -> None:
    read_plain(path)


def append(path: Path) -> None:
    with open_to_append(path) as file:
        file.write(b"x")


def write(path: Path) -> None:
    with written_anew(path) as file:
        file.write(b"x")


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("use", [read, append, write])
def test_what_is_no_plain_file_is_refused(use: Callable[[Path], None], kind: str, tmp_path: Path, victim: Path) -> None:
    path, around = put(kind, tmp_path, victim)
    before = path.lstat()
    expected = kind.removesuffix(" to nowhere").removesuffix(" to a pipe").removesuffix(" to a folder")
    with pytest.raises(NotPlainError) as caught:
        use(path)
    assert caught.value.strerror == f"it is {expected}, and no plain file"
    assert os.path.samestat(path.lstat(), before)
    assert victim.read_text() == VICTIM
    assert sorted(os.listdir(tmp_path)) == around
    assert os.listdir(path.parent) == ["name"]


def test_a_file_with_other_names_is_read_and_replaced_and_never_grows(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "name"
    path.hardlink_to(victim)
    assert read_plain(path) == VICTIM.encode()
    with pytest.raises(NotPlainError, match="hard link"):
        append(path)
    write(path)
    assert (path.read_text(), victim.read_text()) == ("x", VICTIM)
    append(path)
    assert (path.read_text(), victim.read_text()) == ("xx", VICTIM)


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "a folder"])
def test_links_are_replaced_where_that_is_asked_for(kind: str, tmp_path: Path, victim: Path) -> None:
    path, around = put(kind, tmp_path, victim)
    with written_anew(path, replaces_links=True) as file:
        file.write(b"x")
    assert (path.read_text(), victim.read_text()) == ("x", VICTIM)
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == around


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "a folder"])
def test_what_stands_at_the_name_aside_is_removed(kind: str, tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "run" / "name"
    path.parent.mkdir()
    STRANGE[kind](aside_of(path), victim)
    write(path)
    assert (path.read_text(), victim.read_text()) == ("x", VICTIM)
    assert os.listdir(path.parent) == ["name"]


def test_a_folder_at_the_name_aside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "name"
    aside_of(path).mkdir()
    with pytest.raises(NotPlainError) as caught:
        write(path)
    assert caught.value.filename == str(tmp_path / ".name.part")
    assert caught.value.strerror == "it is first written as .name.part, which is a folder"
    assert os.listdir(tmp_path) == [".name.part"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "name"
    write(path)

    def interrupt(path: Path) -> None:
        with written_anew(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt(path)
    assert path.read_text() == "x"
    assert os.listdir(tmp_path) == ["name"]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "nowhere" / "name")


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "a folder"])
def test_a_folder_is_one_of_its_own(kind: str, tmp_path: Path, victim: Path) -> None:
    path, _ = put(kind, tmp_path, victim)
    with pytest.raises(NotPlainError, match="and no folder"):
        make_folder(path)
    path.unlink()
    for _ in range(2):
        make_folder(path)
    assert path.is_dir()


def test_another_file_at_a_name_is_told_from_the_first(tmp_path: Path) -> None:
    for kind in (write, Path.mkdir):
        path = tmp_path / str(kind)
        kind(path)
        place = Place(path)
        assert place.is_same()
        path.rename(tmp_path / f"{kind} moved")
        assert not place.is_same()
        kind(path)
        assert not place.is_same()


@pytest.mark.parametrize(("there", "then"), [(b"", b"new\n"), (b"a\n", b"a\nnew\n"), (b"a\nb", b"a\nb\nnew\n")])
def test_a_line_that_was_cut_off_stays_one_of_its_own(there: bytes, then: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(there)
    with open_to_append_lines(path) as file:
        file.write(b"new\n")
    assert path.read_bytes() == then


@pytest.mark.parametrize("kind", STRANGE)
def test_lines_are_appended_to_nothing_strange(kind: str, tmp_path: Path, victim: Path) -> None:
    path, _ = put(kind, tmp_path, victim)
    with pytest.raises(OSError, match=r"a link|a pipe|a socket|a folder"):
        open_to_append_lines(path)
    assert victim.read_text() == VICTIM
