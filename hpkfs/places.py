"""Where things are: state directories, the device id, control sockets, the lock of a run.

The command line, the daemon and the control client ask here. Only small files are written, each
by one rename or link, so a reader sees all of it or none. It is sync and imports little, since
every command starts with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from hpkfs.core.ids import format_timestamp, is_hex32, make_id
from hpkfs.core.uris import FileStore, PubkyTemplate, StoreUri, parse_uri
from hpkfs.errors import BusyError, FormatError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

HOME_VARIABLE: Final = "HERMES_PUBKY_HOME"
TESTNET_VARIABLE: Final = "HERMES_PUBKY_TESTNET"
SOCKET_DIGITS: Final = 16
# A socket's path holds 107 bytes (unix(7)); a slash, the digits and `.sock` come behind the folder.
RUNTIME_BYTES_MAX: Final = 107 - (1 + SOCKET_DIGITS + 5)
SMALL_FILE_BYTES_MAX: Final = 64 * 1024
LOCK_ATTEMPTS: Final = 20
LOCK_PAUSE_S: Final = 0.05
OUR_FOLDER: Final = "hpkfs"
STORE_NOTE: Final = "store.json"
DEVICE_FILE: Final = "device.json"
LOCK_FILE: Final = "run.lock"


# -- addresses and state directories -------------------------------------------------------


def home() -> str:
    """Return the absolute path of the folder that holds all state directories."""
    return os.path.abspath(
        os.environ.get(HOME_VARIABLE) or os.path.join(os.path.expanduser("~"), ".hermes-pubky")
    )


def network() -> str:
    """Return the Pubky network that addresses mean."""
    return "testnet" if os.environ.get(TESTNET_VARIABLE) == "1" else "mainnet"


def has_scheme(text: str) -> bool:
    """Tell whether a text is written as an address, not as a path."""
    return text.startswith(("file:", "pubky:"))


def resolve_uri(text: str, *, at: str | None = None) -> tuple[StoreUri, str | None]:
    """Parse what a person typed, and follow the links in a path.

    Args:
        text: the address; it may end with `@` and the id of a checkpoint.
        at: the checkpoint that was asked for elsewhere.

    Returns:
        The store, and the checkpoint if one is meant.

    Raises:
        UsageError: the address is refused, or two checkpoints are named.
    """
    parsed = parse_uri(text, cwd=os.getcwd())
    if at is not None and parsed.at is not None and at != parsed.at:
        raise UsageError(
            f"The address names the checkpoint {parsed.at}, and --at names {at}.",
            next_step="Leave one of them out.",
        )
    store = parsed.store
    if isinstance(store, FileStore):
        store = FileStore(os.path.realpath(store.path))
    return store, at or parsed.at


def state_dir(store: StoreUri, named: str | None = None) -> str:
    """Return the absolute path of a store's state directory; it may not exist yet.

    Args:
        store: the store, links resolved.
        named: the directory that the user named instead.
    """
    if named is not None:
        return os.path.realpath(named)
    root = os.path.realpath(home())
    if isinstance(store, FileStore):
        digest = sha256(str(store).encode("utf-8", "surrogateescape")).hexdigest()
        return os.path.join(root, "stores", digest)
    owner = os.path.join(root, "networks", network(), store.owner)
    if isinstance(store, PubkyTemplate):
        return os.path.join(owner, "templates", store.template_id)
    return os.path.join(owner, "agents", store.agent_id)


def known_state_dirs() -> list[str]:
    """Return the state directories at the usual place that hold something of ours, sorted."""
    root = os.path.realpath(home())
    found = [entry.path for entry in _scan(os.path.join(root, "stores"))]
    for net in _scan(os.path.join(root, "networks")):
        for owner in _scan(net.path):
            found += [entry.path for entry in _scan(os.path.join(owner.path, "agents"))]
    return sorted(path for path in found if os.path.isdir(os.path.join(path, OUR_FOLDER)))


def note_store(state_dir: str, uri: str) -> None:
    """Write down which store a state directory belongs to, for `hpkfs list`."""
    path = os.path.join(state_dir, OUR_FOLDER, STORE_NOTE)
    if noted_store(state_dir) != uri:
        make_private(os.path.dirname(path))
        _replace(path, _to_json({"uri": uri}))


def noted_store(state_dir: str) -> str | None:
    """Return the address that `note_store` wrote down, if it did."""
    uri = read_small_json(os.path.join(state_dir, OUR_FOLDER, STORE_NOTE)).get("uri")
    return uri if isinstance(uri, str) else None


def make_private(path: str) -> None:
    """Make a folder and the missing ones above it, for this user only."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


# -- the device id -------------------------------------------------------------------------


def device_file(state_dir: str) -> str:
    """Return where the device id of a state directory is.

    It lies at the root of all state directories; in one that the user named, it lies inside:
    two such directories are two machines.
    """
    root = os.path.realpath(home())
    inside = os.path.realpath(state_dir).startswith(
        (os.path.join(root, "stores") + "/", os.path.join(root, "networks") + "/")
    )
    return os.path.join(root if inside else state_dir, DEVICE_FILE)


def device_id(state_dir: str) -> str:
    """Return this machine's id; make it if there is none.

    Raises:
        FormatError: the file holds something else.
    """
    path = device_file(state_dir)
    for _ in range(2):
        try:
            data = _read(path)
        except FileNotFoundError:
            data = b""
        if data:
            return _parse_device(path, data)
        _make_device(path)
    return _parse_device(path, _read(path))


def _make_device(path: str) -> None:
    """Create the file with a new id, or leave the one that another process was faster to make.

    An empty file is what a power cut leaves; it is replaced.
    """
    make_private(os.path.dirname(path))
    made = _write_beside(path, _to_json({"deviceId": make_id(os.urandom(16))}))
    try:
        if os.path.exists(path) and os.path.getsize(path) == 0:
            os.replace(made, path)
        else:
            os.link(made, path)
    except FileExistsError:
        pass
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)


def _parse_device(path: str, data: bytes) -> str:
    try:
        value = json.loads(data)["deviceId"]
    except (ValueError, TypeError, KeyError) as error:
        raise _bad_device(path) from error
    if not isinstance(value, str) or not is_hex32(value):
        raise _bad_device(path)
    return value


def _bad_device(path: str) -> FormatError:
    return FormatError(
        f"{path} does not hold the id of this machine.",
        kept="Nothing was changed.",
        next_step="Remove it; a new id is made at the next start.",
    )


# -- the runtime folder and the register of mounts -----------------------------------------


def runtime_dir() -> str:
    """Return the folder of the control sockets; make it if it is missing.

    Raises:
        UsageError: it belongs to someone else, or others may enter it.
    """
    session = os.environ.get("XDG_RUNTIME_DIR")
    path = os.path.join(session or "", "hpkfs")
    if not session or not os.path.isdir(session) or len(os.fsencode(path)) > RUNTIME_BYTES_MAX:
        path = f"/tmp/hpkfs-{os.getuid()}"  # the name is fixed, so its owner is checked below
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(
            f"{path} is not a folder of yours, so control sockets in it cannot be trusted.",
            next_step="Set XDG_RUNTIME_DIR to a folder of yours, or have it removed.",
        )
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def socket_path(state_dir: str, *, mountpoint: str | None = None) -> str:
    """Return the control socket of a state directory.

    Args:
        state_dir: the state directory.
        mountpoint: given for a read-only mount, which has a socket of its own.
    """
    key = os.path.realpath(state_dir)
    if mountpoint is not None:
        key += "\0" + mountpoint
    digest = sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(runtime_dir(), digest[:SOCKET_DIGITS] + ".sock")


def record_path(socket_path: str) -> str:
    """Return the register's file that stands beside a control socket."""
    return socket_path.removesuffix(".sock") + ".json"


def register(socket_path: str, record: dict[str, object]) -> None:
    """Make a mount known to commands."""
    _replace(record_path(socket_path), _to_json(record))


def unregister(socket_path: str) -> None:
    """Take a mount and its socket out of the register."""
    for path in (record_path(socket_path), socket_path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def registered() -> list[tuple[str, dict[str, object]]]:
    """Return socket and record of each registered mount, also of those that are gone."""
    found = []
    for entry in _scan(runtime_dir(), folders=False):
        if entry.name.endswith(".json"):
            record = read_small_json(entry.path)
            if record:
                found.append((entry.path.removesuffix(".json") + ".sock", record))
    return sorted(found, key=lambda pair: pair[0])


# -- the lock ------------------------------------------------------------------------------


class RunLock:
    """The lock of a state directory, shared with the other v2 program; a kill frees it."""

    def __init__(self, state_dir: str) -> None:
        self.path = os.path.join(state_dir, LOCK_FILE)
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock; the state directory is made if it is missing.

        Raises:
            BusyError: another process has it; the message names the process.
        """
        assert self._fd is None, "taken once"
        make_private(os.path.dirname(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{format_timestamp(int(time.time()))}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _lock(self, fd: int) -> None:
        """Try for a second: a status check of the peer holds the lock for a moment."""
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    raise self._busy(fd) from error
            time.sleep(LOCK_PAUSE_S)

    def _busy(self, fd: int) -> BusyError:
        pid = os.pread(fd, 100, 0).decode("ascii", "replace").split("\n")[0]
        holder = f"process {pid}" if pid.isdecimal() else "another process"
        return BusyError(
            f"The agent's state in {os.path.dirname(self.path)} is in use by {holder}.",
            kept="Nothing was changed.",
            next_step="`hpkfs list` shows what is mounted; unmount it, or wait for its end.",
        )

    def release(self) -> None:
        """Let go of the lock; the file stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


# -- small files ---------------------------------------------------------------------------


def read_small_json(path: str) -> dict[str, object]:
    """Read a small JSON object; an absent or damaged one is empty."""
    try:
        value = json.loads(_read(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(SMALL_FILE_BYTES_MAX)


def _to_json(value: dict[str, object]) -> bytes:
    return (json.dumps(value) + "\n").encode("ascii")


def _replace(path: str, data: bytes) -> None:
    os.replace(_write_beside(path, data), path)


def _write_beside(path: str, data: bytes) -> str:
    """Write a private file next to `path`, and return its name.

    No point of `durable.py`: each of these files is made again when it is lost.
    """
    beside = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    return beside


def _scan(path: str, *, folders: bool = True) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir() or not folders]
    except (FileNotFoundError, NotADirectoryError):
        return []
