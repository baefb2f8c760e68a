"""Scripts as processes of their own, forked from one that has imported what they need: imports are most of their time.

A script sees what it would under python or torchrun: its arguments, its folder, and the variables of a group.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT = 240.0


class Scripts:
    """Runs scripts, one after the other."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        offline = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **offline},
        )

    def run(
        self, script: Path, *arguments: str, folder: Path, processes: int = 1, imports: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script in ``folder``; if one of several processes fails, the others are killed.

        Args:
            script: path of it.
            arguments: of it.
            folder: where it runs.
            processes: of a group, as torchrun's on one machine.
            imports: modules that take long to import, which all later scripts then have too.
        """
        with tempfile.TemporaryDirectory() as beside:
            out, err = Path(beside) / "out", Path(beside) / "err"
            request = {
                "script": str(script),
                "arguments": [str(script), *arguments],
                "folder": str(folder),
                "groups": group(processes),
                "imports": list(imports),
                "out": str(out),
                "err": str(err),
            }
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            self._parent.stdin.write(json.dumps(request) + "\n")
            self._parent.stdin.flush()
            code = int(self._parent.stdout.readline())
            return subprocess.CompletedProcess(request["arguments"], code, out.read_text(), err.read_text())

    def close(self) -> None:
        self._parent.kill()


def group(processes: int) -> list[dict[str, str]]:
    """The variables of each process of a group; none of a process alone."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}
    return [{"RANK": str(i), "LOCAL_RANK": str(i), **shared} for i in range(processes)]


def become(request: dict[str, Any], variables: dict[str, str]) -> int:
    """Runs the script in this process; returns its exit code."""
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(variables)
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(request["script"]).parent)
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as stopped:
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(request: dict[str, Any]) -> int:
    """Runs a request's processes; returns 0, or the code of the first that failed."""
    children: set[int] = set()
    for variables in request["groups"]:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            code = become(request, variables)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.add(child)
    failed, end = 0, time.monotonic() + TIMEOUT
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
        children.discard(child)
        late = time.monotonic() > end
        if (child and status) or late:
            failed = failed or os.waitstatus_to_exitcode(status) or 1
            for other in children:
                os.kill(other, signal.SIGKILL)
            end = float("inf")
    return failed


if __name__ == "__main__":
    for line in sys.stdin:
        wanted = json.loads(line)
        for module in ("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", *wanted["imports"]):
            importlib.import_module(module)
        print(fork(wanted), flush=True)
