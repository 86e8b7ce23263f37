"""What a Ray cluster cannot do without, watched: else Ray's C++ part ends the driver, a minute late and in its words.

Most calls to Ray that wait ask its gcs_server. Where that is gone they neither return nor heed a signal, and after 60 s
the process exits with code 1. So each such call runs in a thread, and whoever waits for it looks at the head meanwhile.
A thread that is stuck stays behind; `ray.shutdown` works beside it, and a new Ray can be started.

- Of a private Ray gcs_server and raylet are children of this process, whose end is known at once.
- Of a Ray that was joined the port of gcs_server is tried. One that is set up to be restarted may be away for a while:
  `AWAY_S`, less than the minute after which Ray gives up.
"""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait

from nemo_rl_offload.cluster.background import in_background
from nemo_rl_offload.errors import NemoRLOffloadError, ResourceError, WorkerError

LOOK_S = 1.0
"""How long a call may take until the head is looked at."""
TRY_PERIOD_S = 3.0
AWAY_S = 30.0


class Head:
    """Of a Ray that somebody else looks after."""

    def check(self) -> None:
        """Raise a NemoRLOffloadError where the cluster has lost what it needs."""

    @property
    def is_lost(self) -> bool:
        """Whether `check` raises."""
        try:
            self.check()
        except NemoRLOffloadError:
            return True
        return False

    def ask[R](self, call: Callable[[], R]) -> R:
        """Return what the call returns, which may wait for Ray. Raises as the call and as `check`."""
        self.check()
        answer = in_background(call, "question to Ray")
        while not wait([answer], timeout=LOOK_S).done:
            self.check()
        if answer.exception() is not None:
            self.check()
        return answer.result()

    def close(self) -> None:
        """End the watch."""


class OwnHead(Head):
    """Of a private Ray.

    Args:
        daemons: its processes, by name; those that are there already, while it starts.
        logs: the folder with their logs.
    """

    def __init__(self, daemons: Mapping[str, "subprocess.Popen[bytes]"], logs: str) -> None:
        self._daemons = daemons
        self._logs = logs

    def check(self) -> None:
        """Raise WorkerError where one of the processes has ended: new ones can be started."""
        for name, process in list(self._daemons.items()):  # it grows while Ray starts
            if (code := process.poll()) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                log = f"{self._logs}/{name}.out"
                cause = "A kill for lack of memory leaves a trace in the machine's `dmesg`."
                if code >= 0:
                    cause = f"{_last_words(log)}A machine that is very busy lets it wait too long: start again then."
                raise WorkerError(
                    f"Ray's process {name} (pid {process.pid}), which all workers depend on, {how}. {cause} Its log: "
                    f"{log}"
                )


def _last_words(log: str) -> str:
    """The line of a log with the check that ended its process, where there is one."""
    with contextlib.suppress(OSError), open(log, errors="replace") as file:
        for line in file:
            if (found := line.find("Check failed")) >= 0:
                return f"It says: {line[found:].strip()[:200]} "
    return ""


class JoinedHead(Head):
    """Of a Ray that was joined; the address is that of its gcs_server."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._heard_s = time.monotonic()
        self._is_closed = threading.Event()
        threading.Thread(target=self._try, daemon=True).start()

    def check(self) -> None:
        """Raise ResourceError where nobody has answered for a while."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s > AWAY_S:
            raise ResourceError(
                f"The Ray cluster's gcs_server at {self._address[0]}:{self._address[1]} has not answered for "
                f"{silent_s:.0f} s, and without it no worker can be reached. Is its head node up? `ray status` tells."
            )

    def close(self) -> None:
        self._is_closed.set()

    def _try(self) -> None:
        while not self._is_closed.wait(TRY_PERIOD_S):
            try:
                socket.create_connection(self._address, timeout=TRY_PERIOD_S).close()
            except OSError:
                continue
            self._heard_s = time.monotonic()
