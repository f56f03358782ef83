"""A daemon in the background: fork, let go of the terminal, say when it is ready.

`cli.py` forks here *before* it imports what a mount needs, so that no thread and no loop exists
yet. The child tells the parent by one JSON line on a pipe how the start ended; the parent
passes that on to the person. In the foreground systemd is told instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from hpkfs.client import describe_error, rebuild_error
from hpkfs.errors import HpkfsError, UsageError
from hpkfs.terminal import explain

if TYPE_CHECKING:
    from collections.abc import Callable

    Ready: TypeAlias = Callable[[dict[str, object]], None]
    Run: TypeAlias = Callable[[Ready], int]

LOG_BYTES_MAX: Final = 4 * 1024 * 1024
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FD_MAX: Final = 1 << 20
READ_BYTES: Final = 64 * 1024
BUG_EXIT_CODE: Final = 1


def start(run: Run, *, log_path: str) -> dict[str, Any]:
    """Run something in a daemon, and return when it is ready.

    Args:
        run: is called in the child with a function to call once it is ready; returns the
            child's exit code.
        log_path: where the child's log goes; its folder exists.

    Returns:
        What the child handed to that function.

    Raises:
        HpkfsError: what the child raised before it was ready.
        OSError: the log cannot be written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    reading, pipe_end = os.pipe()
    # Above the standard three, which the child replaces, even if the caller has closed those.
    writing = fcntl.fcntl(pipe_end, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(pipe_end)
    pid = os.fork()
    if pid == 0:
        _become_daemon(run, writing, log, log_path)
    os.close(writing)
    os.close(log)
    try:
        with open(reading, "rb") as pipe:
            line = pipe.readline()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    if not line:
        os.waitpid(pid, 0)
        raise UsageError(
            "The daemon ended before the mount was ready.",
            next_step=f"Its log says more: {log_path}.",
        )
    told = json.loads(line)
    if not told["ok"]:
        os.waitpid(pid, 0)
        raise rebuild_error(told["error"])
    result = told["result"]
    assert isinstance(result, dict), "written below"
    return result


def _become_daemon(run: Run, writing: int, log: int, log_path: str) -> NoReturn:
    code = BUG_EXIT_CODE
    try:
        os.setsid()
        _let_go(writing, log)
        set_up_log(log_path)
        code = _run_and_tell(run, writing)
    finally:
        os._exit(code)


def _let_go(writing: int, log: int) -> None:
    """Leave the folder and every descriptor of the caller, who may wait for their end."""
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, writing)
    os.closerange(writing + 1, FD_MAX)


def _run_and_tell(run: Run, writing: int) -> int:
    import logging

    log = logging.getLogger(__name__)
    pipe = [writing]

    def tell(told: dict[str, object]) -> None:
        while pipe:
            fd = pipe.pop()
            with contextlib.suppress(BrokenPipeError):  # who started us has gone; go on
                os.write(fd, json.dumps(told).encode("ascii") + b"\n")
            os.close(fd)

    try:
        return run(lambda result: tell({"ok": True, "result": result}))
    except HpkfsError as error:
        log.error("%s", error)
        tell({"ok": False, "error": describe_error(error)})
        return error.exit_code
    except BaseException as error:
        log.critical("the daemon failed", exc_info=error)
        told = explain(error) if isinstance(error, OSError) else _describe_bug(error)
        tell({"ok": False, "error": describe_error(told)})
        return told.exit_code


def _describe_bug(error: BaseException) -> HpkfsError:
    return HpkfsError(
        f"The daemon failed ({type(error).__name__}).",
        kept="Everything written before is safe on this machine.",
        next_step="hpkfs/daemon.log in the state directory holds the details.",
    )


def set_up_log(log_path: str | None) -> None:
    """Send log messages to a file that cannot grow without end, or to stderr."""
    import logging
    import logging.handlers

    handler: logging.Handler = logging.StreamHandler()
    if log_path is not None:
        handler = logging.handlers.RotatingFileHandler(
            log_path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8", errors="replace"
        )
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])


def notify_systemd(state: str) -> None:
    """Tell the service manager, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)
