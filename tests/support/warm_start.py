"""Starts the services of stacks under test by forking a process that has imported already what they import.

On two cores the imports of torch and transformers are most of what a stack's start takes. What is forked is a process
of its own like any other: with its command's arguments and environment, the test's child, to be killed and waited for.

python -m tests.support.warm_start FD  # the process to be forked; requests come by the socket of that number
"""

from __future__ import annotations

import array
import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from services.cli.launcher import worker_environment

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 20
_LINE_BYTES = 1 << 20
# Those that a service imports, besides what these import.
_IMPORTED = (
    "services.cli.app",
    "services.draft.server",
    "services.router.server",
    "services.target.server",
    "transformers.models.llama.modeling_llama",
)


class ForkedProcess:
    """What `asyncio.create_subprocess_exec` would give, as far as ServiceProcess uses it."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class WarmStart:
    """The process to be forked, begun at the first start."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._interpreter = sys.executable

    async def spawn(self, *command: str, env: Mapping[str, str], **options: Any) -> Any:
        """In place of `asyncio.create_subprocess_exec`, of which `options` are: a Python module's command is forked,
        any other started as ever."""
        if command[:2] != (self._interpreter, "-m"):
            return await asyncio.create_subprocess_exec(*command, env=env, **options)
        assert options["stdout"] == PIPE, options
        read_end, write_end = os.pipe()
        try:
            pid = await asyncio.to_thread(self._fork, command[2:], env, write_end)
        finally:
            os.close(write_end)
        stdout = asyncio.StreamReader(limit=_LINE_BYTES)
        pipe = os.fdopen(read_end, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
        return ForkedProcess(pid, stdout)

    def stop(self) -> None:
        """Ends the process to be forked; those that it was forked into go on."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()

    def _fork(self, command: tuple[str, ...], environment: Mapping[str, str], output: int) -> int:
        request = json.dumps({"command": command, "environment": dict(environment), "parent": os.getpid()}).encode()
        descriptors = array.array("i", [output])
        with self._lock:
            if self._socket is None:
                self._start()
            assert self._socket is not None
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
            return int(self._socket.recv(_MOST_BYTES))

    def _start(self) -> None:
        # What it forks is to be ours: a process whose parent ends falls to the next of its forebears that asks for it.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (ours, its):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
        self._process = subprocess.Popen(
            [self._interpreter, "-m", __name__, str(its.fileno())],
            env=worker_environment(os.environ),
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()
        self._socket = ours


def main() -> None:
    """Forks at each request until the other end is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in _IMPORTED:
        importlib.import_module(module)
    # What takes longest of a worker's start on two cores: to read the patterns of all models' weights, and to measure
    # steps as often as is worth it for who serves with what was measured.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    importlib.import_module("shared.engine.runner")._MEASURED_TURNS = 2  # type: ignore[attr-defined]
    # What is imported is never collected: each process would look through all of it, and copy what it looks at.
    gc.freeze()
    while True:
        request, ancillary, _, _ = requests.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(array.array("i").itemsize))
        if not request:
            return
        output = array.array("i", ancillary[0][2])[0]
        between = os.fork()
        if between == 0:
            # It ends at once, and leaves the service to the test.
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become(json.loads(request), output)
            requests.send(str(pid).encode())
            os._exit(0)
        os.close(output)
        os.waitpid(between, 0)


def _become(request: Mapping[str, Any], output: int) -> NoReturn:
    """Is the service, to its end: which is at once behind what its modules do at exit, as taking all of them apart
    would take a second and more of a core."""
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, place)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    # Else all that are forked would draw the same numbers.
    random.seed()
    np.random.seed()
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
