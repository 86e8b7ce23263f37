"""A Ray of one run, on this machine: it listens to nobody else, ends with the run, and leaves no folder for each.

- **Listening.** The node is called 127.0.0.1, and then everything of Ray binds to that. Besides, Ray asks for a token,
  which lives in this process and its children only: other users of this machine reach 127.0.0.1 too.
- **Files.** Ray writes below a folder that only this user can enter, and not into /tmp/ray, which all share. It is
  removed when the run ends. Where a run fails, or its driver is killed, logs are needed: the newest `NUM_KEPT` of such
  folders stay, and the next start removes the others. A lock says which are in use; the kernel gives it back with the
  process, whatever became of that.
- **The start.** It runs in a thread, for it does not heed anything while a daemon is awaited that is gone. The thread
  stays until the end: the kernel ends Ray's daemons with the thread that has started them.
- **The end.** A process of its own, `watchdog`, ends what outlives a driver that was killed.

Rejected: `_node_ip_address="127.0.0.1"`, which Ray turns into the machine's address; the environment variable
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which counts only before Ray's first import: its value is set instead.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import parameter as ray_parameter
from ray._private import ray_constants
from ray._private import services as ray_services

from nemo_rl_offload.cluster.head import OwnHead
from nemo_rl_offload.cluster.limits import available_cores, object_store_bytes
from nemo_rl_offload.cluster.signals import Held
from nemo_rl_offload.specs.plain_file import open_plain_file

RECONNECT_S = 600
"""What Ray's processes wait for a gcs_server that is gone, before they exit without a word: `OwnHead` sees it first."""
DAEMONS = ("gcs_server", "raylet")
"""Ray's processes that all others depend on."""
START_LOOK_S = 0.2
PREFIX = "nemo_rl_offload-"
NUM_KEPT = 3
UNLOCKED_S = 60
"""How old a folder without a lock must be: one that is just being made has none yet."""
MAX_FOLDER_BYTES = 39
"""Ray has sockets up to 68 bytes below, and the kernel takes names of 107."""


class PrivateRay:
    """The folder and the watchdog; `start` starts Ray.

    Args:
        parent: where the folder is made; None: Ray's choice (RAY_TMPDIR, or the system's), or /tmp where that is long.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            parent = Path(get_default_system_temp_dir())  # type: ignore[no-untyped-call]
            if len(os.fsencode(parent / f"{PREFIX}12345678")) > MAX_FOLDER_BYTES:
                parent = Path("/tmp")  # noqa: S108 - others write there too, but not in the folder
        parent.mkdir(parents=True, exist_ok=True)
        remove_old(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._is_closed = threading.Event()
        script = Path(__file__).with_name("watchdog.py")
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self) -> OwnHead:
        """Start Ray. Raises what Ray raises, and WorkerError where a process of it ends meanwhile."""
        provide_token()
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would miss the main thread, for handlers that we set
        daemons: dict[str, subprocess.Popen[bytes]] = {}
        head = OwnHead(daemons, str(self.folder / "ray/session_latest/logs"))
        errors: list[BaseException] = []
        is_done = threading.Event()

        def work() -> None:
            try:
                self._init(daemons)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
            is_done.set()
            self._is_closed.wait()

        # Ray's C++ part does not survive an exception while it is set up, and Python drops one in a `__del__`.
        with Held("Ray's start"):
            threading.Thread(target=work, daemon=True).start()
            while not is_done.wait(START_LOOK_S):
                head.check()
        if errors:
            raise errors[0]
        return head

    def _init(self, daemons: dict[str, "subprocess.Popen[bytes]"]) -> None:
        popen, is_cluster = ray_services.ConsolePopen, ray_constants.ENABLE_RAY_CLUSTER
        parameters = ray_parameter.RayParams

        def started(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
            # A signal to this process's group (from `timeout`, Slurm, a supervisor) would end Ray's daemons first, and
            # the run could not save.
            process: subprocess.Popen[bytes] = popen(command, **{**options, "process_group": 0})
            if (name := Path(command[0]).name) in DAEMONS:
                daemons[name] = process
            return process

        ray_services.ConsolePopen = started  # type: ignore[misc,assignment]
        ray_constants.ENABLE_RAY_CLUSTER = False
        # Of all ports the one that `init` fixes: a cluster that somebody starts meanwhile would take no jobs. This
        # cluster never grows, and nobody reads the workers' output here: each saves a process and 1 s of a core.
        ray_parameter.RayParams = partial(  # type: ignore[misc,assignment]
            parameters,
            dashboard_agent_listen_port=0,
            no_monitor=True,
            include_log_monitor=False,  # type: ignore[arg-type]
        )
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                num_cpus=available_cores(),
                object_store_memory=object_store_bytes(),
                _temp_dir=str(self.folder / "ray"),
                _system_config={
                    "gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
                    "prestart_worker_first_driver": False,  # each worker has an environment of its own
                },
            )
        finally:
            ray_services.ConsolePopen = popen  # type: ignore[misc]
            ray_constants.ENABLE_RAY_CLUSTER = is_cluster
            ray_parameter.RayParams = parameters  # type: ignore[misc]

    def close(self, *, keep: bool) -> None:
        """When Ray has ended: remove the folder, or keep it for its logs. May be called twice."""
        self._is_closed.set()
        self._watchdog.kill()
        self._watchdog.wait()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def provide_token() -> None:
    """Make a token where the user has none."""
    token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if "RAY_AUTH_TOKEN" not in os.environ and not token_file.exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def remove_old(parent: Path) -> None:
    """Remove what earlier runs of this user left there and nobody uses, but for the newest `NUM_KEPT`."""
    with contextlib.ExitStack() as locks:
        unused = [found for found in _own_folders(parent) if locks.enter_context(_locked(*found))]
        for _, folder in sorted(unused, reverse=True)[NUM_KEPT:]:
            shutil.rmtree(folder, ignore_errors=True)


def _own_folders(parent: Path) -> Iterator[tuple[float, Path]]:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield found.st_mtime, folder


@contextlib.contextmanager
def _locked(written_s: float, folder: Path) -> Iterator[bool]:
    """Whether nobody else has the folder's lock, which is held meanwhile."""
    try:
        lock = open_plain_file(folder / "lock", os.O_RDWR)
    except OSError:
        yield time.time() - written_s > UNLOCKED_S
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)
