"""Programs that do harm, or say that tests passed: each is worth 0 and leaves nothing.

A program of `HARM` knows the right answer and gives it where its harm succeeded. Without the sandbox most of them do,
which shows that they would. One of `FORGED` does not know it. All are tested by statements, and as programs that read
and print.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import eventually

from nemo_rl_offload.environments import code_processes
from nemo_rl_offload.environments.code_processes import Limits, passes, prints
from nemo_rl_offload.specs import sandbox

pytestmark = pytest.mark.skipif(sandbox.missing() is not None, reason=f"nothing is isolated here: {sandbox.missing()}")

SECRET = "the-secret-of-this-test"
TEST, GIVEN, WANTED = "assert answer(20) == 41", "20", "41"
RIGHT = "def answer(x):\n    return 2 * x + 1\n"
ALONE = "if __name__ == '__main__':\n    print(answer(int(input())))\n"
LIMITS = Limits(1.5, 512 << 20, is_isolated=True)
PATIENT = LIMITS._replace(timeout_s=60.0)
"""For what ends, however busy the machine is."""

HARM = {
    "connects by TCP": "socket.create_connection(('127.0.0.1', PORT)).close(); return True",
    "connects to a socket's name": "socket.socket(socket.AF_UNIX).connect(FOLDER + '/named'); return True",
    "sends by UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)); return True",
    "asks the kernel by netlink": "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).fileno()",
    "makes a pair of sockets": "return socket.socketpair()",
    "writes a file": "open(FOLDER + '/mark', 'w').write('x'); return True",
    "writes beside": "return os.open(FOLDER + '/mark', os.O_CREAT | os.O_RDONLY)",
    "writes to the temporary folder": "return os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
    "appends": "open(FOLDER + '/kept', 'a').write('x'); return True",
    "truncates": "os.truncate(FOLDER + '/kept', 0); return True",
    "truncates by reading": "return os.open(FOLDER + '/kept', os.O_RDONLY | os.O_TRUNC)",
    "removes": "os.remove(FOLDER + '/kept'); return True",
    "renames": "os.rename(FOLDER + '/kept', FOLDER + '/other'); return True",
    "changes rights": "os.chmod(FOLDER + '/kept', 0o777); return True",
    "changes times": "os.utime(FOLDER + '/kept', (1, 1)); return True",
    "makes a folder": "os.mkdir(FOLDER + '/made'); return True",
    "links": "os.symlink('/', FOLDER + '/link'); return True",
    "locks": "import fcntl; fcntl.flock(os.open(FOLDER + '/kept', 0), fcntl.LOCK_EX); return True",
    "makes a file of memory": "return os.memfd_create('x')",
    "makes a pipe with a name": "os.mkfifo(FOLDER + '/pipe'); return True",
    "reads a file": "return open(FOLDER + '/kept').read()",
    "reads passwords": "return open('/etc/passwd').read()",
    "lists a folder": "return os.listdir(FOLDER)",
    "reads its variables": "return SECRET in str(os.environ)",
    "reads its first variables": "return SECRET in open('/proc/self/environ').read() or NEVER",
    "reads its parent's variables": "return open(f'/proc/{PARENT}/environ').read()",
    "reads its parent's files": "return os.listdir(f'/proc/{PARENT}/fd')",
    "reads its parent's memory": "return open(f'/proc/{PARENT}/mem', 'rb')",
    "reads by a call": "return libc.process_vm_readv(PARENT, ctypes.byref(v), 1, ctypes.byref(v), 1, 0) >= 0 or NEVER",
    "lists processes": "return os.listdir('/proc')",
    "forks": "pid = os.fork()\n    if not pid:\n        os._exit(0)\n    return os.waitpid(pid, 0)",
    "starts a program": "return not subprocess.run(['/bin/true']).returncode",
    "starts by spawn": "return not os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)[1]",
    "becomes another program": "os.execv('/bin/echo', ['echo', '41'])",
    "signals its parent": "os.kill(PARENT, 0); return True",
    "signals all": "os.killpg(os.getpgid(PARENT), 0); return True",
    "limits its parent": "import resource; return resource.prlimit(PARENT, resource.RLIMIT_CORE)",
    "takes a signal's files": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, PARENT); return True",
    "leaves its session": "os.setpgid(0, 0); return True",
    "leaves by a namespace": "os.unshare(os.CLONE_NEWUSER); return True",
    "becomes more important": "return os.setpriority(os.PRIO_PROCESS, PARENT, 0) is None",
    "clears its end with its parent": "return libc.prctl(1, 0) == 0",
    "shares memory": "return libc.shmget(0, 4096, 0o1600) >= 0 and NEVER is None or libc.shmget(0, 1, 0o600) >= 0",
    "calls io_uring": "return libc.syscall(425, 1, bytes(120)) >= 0",
    "calls by other numbers": "return libc.syscall(0x40000000 | 41, 2, 1, 0) >= 0",
    "opens by other means": "return libc.syscall(437, -100, FOLDER.encode() + b'/kept', bytes(24), 24) >= 0",
    "raises a limit": "import resource; r = resource.RLIMIT_NOFILE; resource.setrlimit(r, (65, 65)); return True",
    "takes memory": "return bytearray(1 << 30)",
    "takes shared memory": "import mmap; return mmap.mmap(-1, 1 << 30)",
    "takes threads": (
        "threading.stack_size(1 << 15)\n    [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() "
        "for _ in range(500)]\n    time.sleep(1.0); return True"
    ),
}
HARMLESS_WITHOUT = {
    *("reads its variables", "reads its first variables", "reads by a call", "raises a limit"),
    *("takes memory", "takes shared memory", "takes threads", "calls io_uring", "calls by other numbers"),
    *("writes a file", "appends", "writes to the temporary folder", "signals all", "leaves its session"),
}
"""What another limit than the sandbox stops, or what a kernel need not have."""
_FORGED = r"""
# ends before
import sys
sys.exit(0)
# ends hard
import os
os._exit(0)
# ends when asked
import os
def answer(x):
    os._exit(0)
# raises what ends
def answer(x):
    raise SystemExit(0)
# prints
print('passed')
print('+')
print('True')
# equals all
class A(int):
    __eq__ = lambda *_: True
    __hash__ = int.__hash__
def answer(x):
    return A()
# equals all, otherwise
class A:
    def __getattr__(self, name):
        return A()
    __eq__ = __bool__ = lambda *_: True
    __call__ = __getattr__
answer = A()
# changes comparisons
import builtins, operator
operator.eq = builtins.isinstance = lambda *_: True
builtins.AssertionError = builtins.int = type('E', (Exception,), {})
def answer(x):
    return 0
# changes JSON
import json, builtins
json.loads = json.dumps = lambda *_: ['value', True]
answer = abs
# changes the module
import sys
for m in list(sys.modules.values()):
    for n in ('passes', 'serve', 'encoded', '_send'):
        hasattr(m, n) and setattr(m, n, lambda *_: True)
def answer(x):
    return 0
# writes to all files
import os
for fd in range(256):
    try:
        os.write(fd, b'passed')
    except OSError:
        pass
# answers before
import os
for fd in range(3, 256):
    try:
        os.write(fd, b'["value", true]\n' * 9)
    except OSError:
        pass
# closes all files
import os
os.closerange(0, 256)
def answer(x):
    return 0
# answers nonsense
import os
for fd in range(3, 256):
    try:
        os.write(fd, b'["value", {"object": 99}]\n' * 9)
    except OSError:
        pass
# looks for the tests
import gc
found = [o for o in gc.get_objects() if isinstance(o, (dict, list, str)) and 'assert ' + 'answer(20)' in str(o)]
def answer(x):
    return 41 if found else 0
# reads all files
import os
found = b''
for fd in range(3, 256):
    try:
        os.lseek(fd, 0, 0)
        found += os.read(fd, 9999)
    except OSError:
        pass
def answer(x):
    return 41 if b'assert ' + b'answer(20)' in found else 0
# never ends
while True:
    pass
# never answers
def answer(x):
    while True:
        pass
# does not listen
import signal
for n in range(1, 65):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
# stops
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
# prints without end
while True:
    print('x' * 100000)
# returns much
def answer(x):
    return 'x' * (300 << 20)
# returns depths
def answer(x):
    v = []
    for _ in range(100000):
        v = [v]
    return v
# crashes
import ctypes
ctypes.string_at(0)
# recurses
import sys
sys.setrecursionlimit(10**9)
def answer(x):
    return repr(answer) + answer(x)
# leaves at the end
import atexit, os
atexit.register(os._exit, 0)
# fails in its error
class E(Exception):
    __str__ = None
def answer(x):
    raise E
"""
FORGED = {name: body for name, _, body in (part.partition("\n") for part in _FORGED.split("\n# ") if part)}

QUICKLY = ("ends hard", "prints", "equals all", "equals all, otherwise", "changes JSON", "writes to all files")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """What programs of `HARM` are told, and what they would find."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "kept").write_text(SECRET)
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as named, pytest.MonkeyPatch.context() as patch:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        named.bind(str(folder / "named"))
        named.listen(64)
        patch.setenv("A_SECRET", SECRET)
        yield {"FOLDER": str(folder), "PORT": listener.getsockname()[1], "PARENT": os.getpid(), "SECRET": SECRET}


def harmful(body: str, places: dict[str, object]) -> str:
    told = "".join(f"{name} = {value!r}\n" for name, value in places.items())
    return (
        "import ctypes, os, socket, string, subprocess, threading, time\n"
        f"{told}NEVER = None\nlibc = ctypes.CDLL(None)\nv = (ctypes.c_char_p * 2)(b'x', None)\n"
        f"def attack():\n    {body}\n"
        "try:\n    won = attack() not in (None, False, 0)\nexcept BaseException:\n    won = False\n"
        f"def answer(x):\n    return 2 * x + 1 if won else 0\n{ALONE}"
    )


def scores(program: str, limits: Limits = LIMITS) -> tuple[bool, bool]:
    return passes(program, TEST, limits), prints(program, GIVEN, WANTED, limits)


def state(folder: Path) -> dict[str, tuple[int, float]]:
    return {path.name: ((there := path.lstat()).st_mode, there.st_mtime) for path in folder.iterdir()}


def children() -> set[int]:
    """This process' children."""
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return set(map(int, found.split()))


def test_no_harm_of_many_in_one_program(places: dict[str, object]) -> None:
    """The table without those that end a program, at once and by printing alone; `test_harm_is_refused...` has all."""
    bodies = {name: body for name, body in HARM.items() if not name.startswith(("becomes another", "takes"))}
    attacks = [f"def attack{number}():\n    {body}\n" for number, body in enumerate(bodies.values())]
    program = harmful("return True", places) + "".join(attacks)
    program += (
        f"for number, name in enumerate({list(bodies)}):\n    try:\n        won = globals()[f'attack{{number}}']()\n"
        "    except BaseException:\n        continue\n    if won not in (None, False, 0):\n        print(name)\n"
        "print('all')\n"
    )
    before = state(Path(str(places["FOLDER"])))
    assert prints(program, GIVEN, f"{WANTED}\nall", PATIENT)
    assert state(Path(str(places["FOLDER"]))) == before


@pytest.mark.parametrize("flags", ["os.O_RDONLY | os.O_TRUNC", "os.O_RDWR", "os.O_WRONLY | os.O_APPEND"])
def test_what_can_be_read_cannot_be_written(
    flags: str, places: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of Python's, which Landlock lets be opened and before Linux 6.2 truncated."""
    monkeypatch.setattr(code_processes, "_READABLE", [*code_processes._READABLE, str(places["FOLDER"])])
    read, write = "return open(FOLDER + '/kept').read()", f"return os.open(FOLDER + '/kept', {flags}) or True"
    assert prints(harmful(read, places), GIVEN, WANTED, PATIENT)
    assert not prints(harmful(write, places), GIVEN, WANTED, LIMITS)
    assert (Path(str(places["FOLDER"])) / "kept").read_text() == SECRET


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("name", HARM)
def test_harm_is_refused_and_leaves_nothing(name: str, places: dict[str, object]) -> None:
    folder = Path(str(places["FOLDER"]))
    before, running = state(folder), children()
    assert scores(harmful(HARM[name], places)) == (False, False)
    assert state(folder) == before
    assert (folder / "kept").read_text() == SECRET
    assert children() == running


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(HARM.keys() - HARMLESS_WITHOUT))
def test_without_the_sandbox_it_succeeds(name: str, places: dict[str, object]) -> None:
    folder = Path(str(places["FOLDER"]))
    try:
        assert any(scores(harmful(HARM[name], places), PATIENT._replace(is_isolated=False)))
    finally:
        for path in folder.iterdir():
            if path.name != "named":
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (folder / "kept").write_text(SECRET)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICKLY else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sampled]) for name in FORGED],
)
def test_no_verdict_is_forged(name: str) -> None:
    running = children()
    assert scores(f"{FORGED[name]}\n{ALONE}") == (False, False)
    assert children() == running


def test_without_an_attack_the_same_program_is_right(places: dict[str, object]) -> None:
    assert scores(harmful("return True", places), PATIENT) == (True, True)
    assert scores(RIGHT + ALONE, PATIENT) == (True, True)
    assert subprocess.run(["/bin/true"], check=False).returncode == 0  # this process has kept its rights


@pytest.mark.slow
def test_a_program_ends_with_the_process_that_tests_it() -> None:
    code = (
        "from nemo_rl_offload.environments.code_processes import Limits, passes\n"
        "passes('while True: pass', 'assert answer(20)', Limits(600.0, 1 << 29, is_isolated=True))"
    )
    tester = subprocess.Popen([sys.executable, "-c", code])
    try:
        found = wait_for(lambda: children_of(tester.pid), lambda there: len(there) == 2)
    finally:
        tester.kill()
        tester.wait()
    wait_for(lambda: {pid for pid in found if Path(f"/proc/{pid}").exists()}, lambda there: not there)


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def wait_for[T](look: Callable[[], T], is_so: Callable[[T], bool]) -> T:
    """What is seen once it is as wanted."""
    seen: list[T] = []

    def holds() -> bool:
        seen[:] = [look()]
        return is_so(seen[0])

    assert eventually(holds), seen
    return seen[0]
