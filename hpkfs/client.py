"""The commands' side of the control socket, and which mounts there are on this machine.

`cli.py` and the launcher use it. It is sync and imports no trio, since every command starts with
it. A request is one line, `{"op": …, …}`; answers are lines `{"progress": …}` and at last
one of `{"ok": true, "result": …}` or `{"ok": false, "error": …}`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hpkfs import errors, mountpoint, places
from hpkfs.errors import HpkfsError, TransientError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
CONNECT_TIMEOUT_S: Final = 5.0
READ_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class MountRecord:
    """A mount that a daemon serves.

    Attributes:
        uri: the canonical address of the store.
        mountpoint: an absolute path.
        state_dir: the state directory.
        pid: the daemon.
        read_only: whether writes are refused.
        started_at: seconds since 1970.
        socket_path: the daemon's control socket.
    """

    uri: str
    mountpoint: str
    state_dir: str
    pid: int
    read_only: bool
    started_at: int
    socket_path: str

    def inside(self, path: str) -> str | None:
        """Return a resolved path relative to the mount, `""` for its root; None if outside."""
        if path == self.mountpoint:
            return ""
        below = path.removeprefix(self.mountpoint.rstrip("/") + "/")
        return below if below != path else None


class NoDaemonError(TransientError):
    """There is no daemon behind the socket, or it went away before its answer."""


class ControlClient:
    """Asks one daemon."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path

    def request(
        self,
        op: str,
        *,
        timeout_s: float | None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **args: object,
    ) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Args:
            op: what to do.
            timeout_s: how long the daemon may be silent; None for ever.
            on_progress: called with each report of progress.
            args: the request's arguments.

        Raises:
            HpkfsError: what the daemon raised, as the same class.
            NoDaemonError: there is no daemon.
            TransientError: it does not answer in time.
        """
        line = json.dumps({"op": op, **args}).encode("ascii") + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise UsageError("The request is too long; name fewer paths.")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                connection.connect(self._path)
                connection.settimeout(timeout_s)
                # A daemon that refuses at once has answered already, and reads no request.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(line)
                return _read_result(connection, on_progress)
        except TimeoutError as error:
            raise TransientError(
                "The daemon of the mount did not answer in time.",
                kept="Everything written is safe on this machine.",
                next_step="Try again; `hpkfs list` shows the daemon's process.",
            ) from error
        except OSError as error:
            raise _gone() from error


def _read_result(
    connection: socket.socket, on_progress: Callable[[dict[str, Any]], None] | None
) -> dict[str, Any]:
    buffer = bytearray()
    while True:
        while (end := buffer.find(b"\n")) < 0:
            data = connection.recv(READ_BYTES)
            if not data:
                raise _gone()
            buffer += data
            if len(buffer) > LINE_BYTES_MAX:
                raise UsageError("The daemon's answer is too long.")
        reply = json.loads(buffer[:end])
        del buffer[: end + 1]
        if "progress" not in reply:
            return _result_of(reply)
        if on_progress is not None:
            on_progress(reply["progress"])


def _result_of(reply: dict[str, Any]) -> dict[str, Any]:
    if reply.get("ok"):
        result = reply["result"]
        assert isinstance(result, dict), "control.py sends objects"
        return result
    raise rebuild_error(reply["error"])


def describe_error(error: HpkfsError) -> dict[str, object]:
    """Return an error as JSON has it; `rebuild_error` makes it again."""
    return {
        "class": type(error).__name__,
        "exit_code": error.exit_code,
        "happened": error.happened,
        "kept": error.kept,
        "next_step": error.next_step,
    }


def rebuild_error(told: dict[str, Any]) -> HpkfsError:
    """Make the error again that a daemon told; an unknown class by its exit code."""
    known = {kind.__name__: kind for kind in _classes(HpkfsError)}
    kind = known.get(str(told.get("class")))
    if kind is None:
        by_code = {2: errors.SavedLocallyError, 3: errors.ConflictError}
        by_code |= {4: errors.AuthorisationError, 5: errors.QuotaError, 6: errors.IntegrityError}
        kind = by_code.get(told.get("exit_code", 1), HpkfsError)
    return kind(
        str(told.get("happened", "")),
        kept=str(told.get("kept", "")),
        next_step=str(told.get("next_step", "")),
    )


def _classes(kind: type[HpkfsError]) -> list[type[HpkfsError]]:
    """Return the classes of errors.py that take the three sentences and no more."""
    found = [kind]
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found += _classes(child)
    return found


def _gone() -> NoDaemonError:
    return NoDaemonError(
        "The daemon of the mount is gone.",
        kept="Everything written is safe on this machine.",
        next_step="Mount the agent again; it goes on where it was.",
    )


# -- which mounts there are --------------------------------------------------------------------


def all_mounts() -> list[MountRecord]:
    """Return the mounts whose daemons live, by mountpoint; records of dead ones are removed."""
    found = []
    for socket_path, fields in places.registered():
        record = _parse_record(socket_path, fields)
        if record is not None and _lives(record):
            found.append(record)
        elif record is not None and _is_there(record):
            continue  # a dead mount: only its record knows where its state is
        elif places.read_small_json(places.record_path(socket_path)) == fields:
            places.unregister(socket_path)
    return sorted(found, key=lambda record: record.mountpoint)


def find_daemon(state_dir: str) -> MountRecord | None:
    """Return the read-write mount whose daemon has a state directory, a path without links."""
    return next(
        (r for r in all_mounts() if not r.read_only and os.path.realpath(r.state_dir) == state_dir),
        None,
    )


def _is_there(record: MountRecord) -> bool:
    there = mountpoint.mount_on(record.mountpoint)
    return there is not None and there.is_ours


def find_dead_mount(text: str) -> MountRecord | None:
    """Find the record of a mount whose daemon was killed, by a path in it; touches no such path."""
    around = mountpoint.mount_around(mountpoint.resolve(text))
    for socket_path, fields in places.registered():
        record = _parse_record(socket_path, fields)
        if record is not None and around is not None and record.mountpoint == around.path:
            return record
    return None


def find_mount(text: str) -> MountRecord | None:
    """Find the mount that a person means.

    Args:
        text: a mountpoint, a path inside a mount, a state directory, or the address of a store.

    Returns:
        The mount; of several mounts of one store the one that can be written to.
    """
    records = all_mounts()
    if places.has_scheme(text):
        return _writable_first(_by_store(records, text))
    path = mountpoint.resolve(text)
    around = mountpoint.mount_around(path)
    for record in records:
        if around is not None and record.mountpoint == around.path:
            return record
    by_state = [record for record in records if os.path.realpath(record.state_dir) == path]
    return _writable_first(by_state or _by_store(records, text))


def _writable_first(records: list[MountRecord]) -> MountRecord | None:
    return min(records, key=lambda record: record.read_only, default=None)


def _by_store(records: list[MountRecord], text: str) -> list[MountRecord]:
    try:
        store, _ = places.resolve_uri(text)
    except UsageError:
        return []
    return [record for record in records if record.uri == str(store)]


def _parse_record(socket_path: str, fields: dict[str, object]) -> MountRecord | None:
    match fields:
        case {
            "uri": str(uri),
            "mountpoint": str(where),
            "state_dir": str(state_dir),
            "pid": int(pid),
            "read_only": bool(read_only),
        }:
            started_at = fields.get("started_at")
            started = int(started_at) if isinstance(started_at, int | float) else 0
            return MountRecord(uri, where, state_dir, pid, read_only, started, socket_path)
        case _:
            return None


def _lives(record: MountRecord) -> bool:
    """Whether the process is there and its socket takes connections; a stopped one's does too."""
    with contextlib.suppress(PermissionError):  # it lives, as another user
        try:
            os.kill(record.pid, 0)
        except ProcessLookupError:
            return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(record.socket_path)
        except OSError as error:
            return error.errno not in {errno.ECONNREFUSED, errno.ENOENT}
    return True
