"""The daemon's side of the control socket: one JSON object a line, each way.

`mount.py` starts `serve`; `client.py` is the other side and describes the protocol to
programs. Nothing is decided here: a request goes to the daemon's `handle`, and what that returns
or raises goes back. The socket is for this user and root, checked on each connection.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from hpkfs.client import LINE_BYTES_MAX, describe_error
from hpkfs.errors import BusyError, HpkfsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 64
BACKLOG: Final = 32
SEND_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 2.0
READ_BYTES: Final = 64 * 1024
ROOT_ID: Final = 0
# Requests that only wait or read: they end when who asked goes away. All others run to their end.
ABANDONED: Final = frozenset(
    {"sync", "fetch", "status", "history", "log", "store-get", "store-exists", "store-list"}
)


class Daemon(Protocol):
    """What answers requests: a mount, read-write or read-only."""

    # The answers to requests are JSON objects, whose values only their reader knows.
    async def handle(
        self,
        op: str,
        args: dict[str, Any],
        progress: Callable[[dict[str, object]], Awaitable[None]],
    ) -> dict[str, object]:
        """Answer one request; a failure is an `HpkfsError`."""
        ...


async def serve(
    daemon: Daemon,
    socket_path: str,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen until cancelled; the socket's name is removed at the end.

    Args:
        daemon: what answers.
        socket_path: where to listen; a name that nobody listens on any more is replaced.
        task_status: started when connections are accepted.

    Raises:
        BusyError: another daemon listens there.
    """
    listener = await _listen(socket_path)
    places = trio.CapacityLimiter(CONNECTIONS_MAX)

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await _converse(daemon, stream, places)

    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, answer, [listener])
            task_status.started()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)


async def _listen(path: str) -> trio.SocketListener:
    if await _someone_listens(path):
        raise BusyError(
            "Another daemon serves this state directory already.",
            kept="Nothing was changed.",
            next_step="`hpkfs list` shows what is mounted.",
        )
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return trio.SocketListener(listening)


async def _someone_listens(path: str) -> bool:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            with trio.move_on_after(CONNECT_TIMEOUT_S):
                await probe.connect(path)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ECONNREFUSED}:
                return False
            raise
    return True


async def _converse(
    daemon: Daemon, stream: trio.SocketStream, places: trio.CapacityLimiter
) -> None:
    """Answer the requests of one connection, one after the other."""
    try:
        places.acquire_nowait()
    except trio.WouldBlock:
        await _send(stream, _failure(BusyError("Too many commands talk to the daemon at once.")))
        return
    try:
        if not _may_ask(stream):
            return
        lines = _Lines(stream)
        while (line := await lines.read()) is not None:
            await _send(stream, await _answer(daemon, line, stream, lines))
    except UsageError as error:  # the line cannot be read, so neither can the next one
        await _send(stream, _failure(error))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        log.debug("a command went away before its answer")
    finally:
        places.release()


def _may_ask(stream: trio.SocketStream) -> bool:
    size = struct.calcsize("3i")
    credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    assert isinstance(credentials, bytes)
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return uid in {os.getuid(), ROOT_ID}


class _Lines:
    """The lines that come in on a stream."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def read(self) -> bytes | None:
        """Return the next line; None at the end."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not await self._receive():
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def wait_for_end(self) -> None:
        """Return when the other side has gone; what it sends meanwhile waits its turn."""
        with contextlib.suppress(trio.BrokenResourceError):
            while await self._receive():
                pass

    async def _receive(self) -> bool:
        data = await self._stream.receive_some(READ_BYTES)
        self._buffer += data
        if len(self._buffer) > LINE_BYTES_MAX:
            raise UsageError(f"A request is longer than {LINE_BYTES_MAX} bytes.")
        return bool(data)


async def _answer(
    daemon: Daemon, line: bytes, stream: trio.SocketStream, lines: _Lines
) -> dict[str, object]:
    """Carry out one request; whatever goes wrong becomes an answer."""
    one_line_at_a_time = trio.Lock()

    async def progress(told: dict[str, object]) -> None:
        # An answer that nobody waits for must not stop the work.
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with one_line_at_a_time:
                await _send(stream, {"progress": told})

    try:
        op, args = _parse(line)
        if op not in ABANDONED:
            return {"ok": True, "result": await daemon.handle(op, args, progress)}
        return await _answer_while_wanted(daemon, op, args, progress, lines)
    except HpkfsError as error:
        return _failure(error)
    except Exception as error:  # noqa: BLE001  the edge: a bug ends one request, not the mount
        return _failure(_from_bug(error))


async def _answer_while_wanted(
    daemon: Daemon,
    op: str,
    args: dict[str, Any],
    progress: Callable[[dict[str, object]], Awaitable[None]],
    lines: _Lines,
) -> dict[str, object]:
    """Carry out a request that ends when who asked goes away."""
    reply: dict[str, object] = {}

    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await lines.wait_for_end()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        reply = {"ok": True, "result": await daemon.handle(op, args, progress)}
        nursery.cancel_scope.cancel()
    return reply


def _parse(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise UsageError("The request is not JSON.") from error
    if not isinstance(request, dict) or not isinstance(request.get("op"), str):
        raise UsageError("The request is no object with an op.")
    op = request.pop("op")
    return op, request


def _from_bug(error: Exception) -> HpkfsError:
    """Find the one error of ours in a group, or log what happened and make one."""
    inner: BaseException = error
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    if isinstance(inner, HpkfsError):
        return inner
    log.error("a request failed", exc_info=error)
    return HpkfsError(
        f"The daemon failed at this request ({type(inner).__name__}).",
        kept="Everything written before is safe on this machine.",
        next_step="The daemon's log holds the details: hpkfs/daemon.log in the state directory.",
    )


def _failure(error: HpkfsError) -> dict[str, object]:
    return {"ok": False, "error": describe_error(error)}


async def _send(stream: trio.SocketStream, reply: dict[str, object]) -> None:
    """Send a line; also while the daemon ends, since its last answer says how it ended."""
    data = json.dumps(reply).encode("ascii") + b"\n"
    if len(data) > LINE_BYTES_MAX:
        data = json.dumps(_failure(UsageError("The answer is too long; ask for less."))).encode()
        data += b"\n"
    with trio.CancelScope(shield=True), trio.move_on_after(SEND_TIMEOUT_S):
        await stream.send_all(data)
