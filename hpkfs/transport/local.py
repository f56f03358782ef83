"""A store in a directory: the embedded default, and a shared disk or a synced folder.

Writers exclude each other by `flock` on `head.lock`, which a kill frees. A synced folder has no
mutual exclusion: there a second writer is only detected, and the copies that a sync program
makes of a conflicting head are named by `conflict_copies`.

Every file appears whole, by a rename, or not at all. A directory that vanished, or whose disk was
taken away and left an empty mount point, is told apart from a name that is not there: it is
waited for, never taken for an empty store. A disk that hangs holds threads of this transport only,
and a caller is let go after `DISK_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from hpkfs.durable import RealDisk
from hpkfs.errors import (
    AuthorisationError,
    ConflictError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    QuotaError,
    TransientError,
)
from hpkfs.transport.base import HEAD_NAME, Capabilities, check_name, check_put_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.durable import Disk

LOCK_NAME: Final = "head.lock"
FOLDERS: Final = ("objects", "snapshots")
LOCK_TIMEOUT_S: Final = 10.0
LOCK_POLL_S: Final = 0.02
DISK_TIMEOUT_S: Final = 60.0
THREADS_MAX: Final = 32
TEMPORARY_AGE_S_MAX: Final = 86_400.0
_TEMPORARY = re.compile(r"(?:head|[0-9a-f]{32,64})\.[a-z]+\.[0-9a-f]{8}\.tmp")
_CONFLICT_COPY = re.compile(r"head[ ._~(-].*\.json")
_LACKS_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_T = TypeVar("_T")


class LocalTransport:
    """The store in one directory.

    Args:
        root: the directory, absolute.
        create: make the directory and its folders, durably, where they are missing.
        disk: how durable calls are made; tests pass one that fails.
    """

    def __init__(self, root: str, *, create: bool = False, disk: Disk | None = None) -> None:
        self.root = root
        self._disk: Disk = RealDisk() if disk is None else disk
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._was_a_store = False
        self._swept = False
        if create:
            self._create()

    @property
    def capabilities(self) -> Capabilities:
        """A directory excludes writers on one machine and on a shared disk."""
        return Capabilities(writable=True, locks=True, watch=False)

    def _create(self) -> None:
        try:
            for folder in (self.root, *(os.path.join(self.root, name) for name in FOLDERS)):
                if not os.path.isdir(folder):
                    os.makedirs(folder)
                    self._disk.fsync_folder(os.path.dirname(folder), point="store.folder.fsync")
        except (OSError, QuotaError, IntegrityError) as error:
            raise self._translate("the store", error) from error
        self._was_a_store = True

    # -- reading --------------------------------------------------------------------------

    async def get(self, name: str, *, limit: int) -> bytes:
        """See `Transport`."""
        return await self.ask(self.read, name, limit)

    def read(self, name: str, limit: int) -> bytes:
        """`get` for a caller that is in a thread already, so that a read is one thread hop."""
        path = self._path(name)
        try:
            return self._read(path, name, limit)
        except OSError as error:
            raise self._translate(name, error) from error

    def _read(self, path: str, name: str, limit: int) -> bytes:
        # O_NONBLOCK: a fifo under the name of an object must not hold the reader for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._no_file(name)
            if status.st_size > limit:
                raise self._too_long(name, limit)
            data = os.read(fd, limit + 1)
            while len(data) < status.st_size and (more := os.read(fd, limit + 1 - len(data))):
                data += more
        finally:
            os.close(fd)
        if len(data) > limit:
            raise self._too_long(name, limit)
        self._was_a_store = True
        return data

    async def exists(self, name: str) -> bool:
        """See `Transport`."""
        return await self.ask(self._exists, name)

    def _exists(self, name: str) -> bool:
        try:
            self._check_file(name)
        except MissingObjectError:
            return False
        return True

    def _check_file(self, name: str) -> None:
        path = self._path(name)
        try:
            status = os.stat(path)
        except OSError as error:
            raise self._translate(name, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise self._no_file(name)

    async def list_snapshots(self) -> list[str]:
        """See `Transport`."""
        return await self.ask(self._list)

    def _list(self) -> list[str]:
        try:
            names = os.listdir(os.path.join(self.root, "snapshots"))
        except FileNotFoundError:
            self._check_store()
            return []
        except OSError as error:
            raise self._translate("snapshots", error) from error
        return sorted(n.removesuffix(".json") for n in names if _is_snapshot(n))

    def conflict_copies(self) -> list[str]:
        """Names of copies of the head that a sync program made beside it. Blocking."""
        try:
            names = os.listdir(self.root)
        except OSError as error:
            raise self._translate(HEAD_NAME, error) from error
        return sorted(name for name in names if _CONFLICT_COPY.fullmatch(name))

    # -- writing --------------------------------------------------------------------------

    async def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        await self.ask(self.write, name, data)

    def write(self, name: str, data: bytes) -> None:
        """`put` for a caller that is in a thread already."""
        path = os.path.join(self.root, check_put_name(name))
        try:
            if self._holds(path, data):
                return
            folder = os.path.dirname(path)
            if not os.path.isdir(folder):
                self._check_store()
                os.mkdir(folder)
                self._disk.fsync_folder(self.root, point="store.folder.fsync")
            self._disk.write_atomic(path, data, mode=0o644, point="store.object")
        except (OSError, QuotaError, IntegrityError) as error:
            raise self._translate(name, error) from error
        self._was_a_store = True

    def _holds(self, path: str, data: bytes) -> bool:
        """Whether the file is there already with these bytes; if so, it is durable on return.

        A shorter or damaged one (a sync program that was killed) is not taken for the object.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, PermissionError):
            return False
        try:
            if os.fstat(fd).st_size != len(data) or os.read(fd, len(data) + 1) != data:
                return False
            self._disk.fsync_file(fd, point="store.known.fsync")
        finally:
            os.close(fd)
        self._disk.fsync_folder(os.path.dirname(path), point="store.folder.fsync")
        return True

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """See `Transport`. The wait for another writer can be given up; the swap itself ends."""
        deadline = trio.current_time() + LOCK_TIMEOUT_S
        while not await self._ask_shielded(expected, new):
            if trio.current_time() >= deadline:
                raise TransientError(
                    f"Another writer has held the head of {self.root} for {LOCK_TIMEOUT_S:.0f} s.",
                    kept="The head was not changed, and your work is safe on this machine.",
                    next_step="It is tried again by itself.",
                )
            await trio.sleep(LOCK_POLL_S)

    async def _ask_shielded(self, expected: bytes | None, new: bytes) -> bool:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            return await self.ask(self._try_swap, expected, new)
        raise AssertionError("nobody cancels this scope")

    def _try_swap(self, expected: bytes | None, new: bytes) -> bool:
        """Swap under the lock; False when another writer holds it."""
        try:
            self._check_store()
            fd = self._lock()
            if fd is None:
                return False
            try:
                self._swap(expected, new)
            finally:
                os.close(fd)
        except (OSError, QuotaError, IntegrityError) as error:
            raise self._translate(HEAD_NAME, error) from error
        self._was_a_store = True
        return True

    def _lock(self) -> int | None:
        """Take the lock; closing the descriptor, or a kill, frees it. None: it is held."""
        path = os.path.join(self.root, LOCK_NAME)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except PermissionError:  # another user of a shared disk made it: reading is enough
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Someone may have removed the file meanwhile: then two writers would each hold one.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _swap(self, expected: bytes | None, new: bytes) -> None:
        path = os.path.join(self.root, HEAD_NAME)
        try:
            with open(path, "rb") as source:
                current: bytes | None = source.read(len(expected or b"") + 1)
        except FileNotFoundError:
            current = None
        if current != expected:
            raise ConflictError(
                f"The head of {self.root} was moved by someone else.",
                kept="It was not changed, and your work is safe on this machine.",
                next_step="Run `hpkfs sync` to see where both versions are.",
            )
        # A writer that was killed may have left names that are not durable; the head needs them.
        for name in FOLDERS:
            with contextlib.suppress(FileNotFoundError):
                folder = os.path.join(self.root, name)
                self._disk.fsync_folder(folder, point="store.folder.fsync")
        self._disk.write_atomic(path, new, mode=0o644, point="store.head")
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed writers left unfinished, once; the lock of the head is held."""
        if self._swept:
            return
        self._swept = True
        oldest = time.time() - TEMPORARY_AGE_S_MAX
        for folder in (self.root, *(os.path.join(self.root, name) for name in FOLDERS)):
            # What cannot be removed now is left for the next process.
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if _TEMPORARY.fullmatch(entry.name) and entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def reconnect(self) -> None:
        """There are no connections."""

    # -- helpers --------------------------------------------------------------------------

    async def ask(self, call: Callable[..., _T], *args: object) -> _T:
        """Run a blocking call in a thread; a disk that hangs is given up on.

        The thread of a call that was given up ends when the disk lets it. That harms nobody: an
        object appears whole or not at all, and the head moves only from where it was expected.

        Raises:
            TransientError: it took longer than `DISK_TIMEOUT_S`.
        """
        with trio.move_on_after(DISK_TIMEOUT_S):
            return await trio.to_thread.run_sync(
                call, *args, abandon_on_cancel=True, limiter=self._threads
            )
        raise TransientError(
            f"The disk of the store {self.root} did not answer for {DISK_TIMEOUT_S:.0f} s.",
            kept="Your work is safe on this machine.",
            next_step="Check that disk or its network; it is tried again by itself.",
        )

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def _check_store(self) -> None:
        """Tell a store that vanished apart from a name that is not there.

        Raises:
            TransientError: the directory is gone, or empty although it was a store: the mount
                point of a disk that was taken away.
            AuthorisationError: it may not be looked into.
        """
        try:
            names = os.listdir(self.root)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._vanished("is not there") from error
        except OSError as error:
            raise self._translate("the store", error) from error
        if self._was_a_store and not {HEAD_NAME, *FOLDERS}.intersection(names):
            raise self._vanished("is empty, and was a store before")

    def _vanished(self, what: str) -> TransientError:
        return TransientError(
            f"The store's directory {self.root} {what}.",
            kept="Your work is safe on this machine.",
            next_step="Bring it back (is its disk mounted?); it is tried again by itself.",
        )

    def _no_file(self, name: str) -> IntegrityError:
        return IntegrityError(
            f"{name} in {self.root} is not a file.",
            kept="Nothing was changed.",
            next_step="Move away what is there, then run `hpkfs fsck` on the store.",
        )

    def _too_long(self, name: str, limit: int) -> IntegrityError:
        return IntegrityError(
            f"{name} in {self.root} is longer than the {limit:,} bytes that it may have.",
            kept="Nothing was changed.",
            next_step="Run `hpkfs fsck` on the store.",
        )

    def _translate(self, name: str, error: OSError | HpkfsError) -> HpkfsError:
        """Say what an error of the system, or of `durable.py`, means for this store."""
        if isinstance(error, HpkfsError):
            if not isinstance(error.__cause__, OSError):
                return error
            error = error.__cause__
        safe = "Your work is safe on this machine."
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                try:
                    self._check_store()
                except HpkfsError as vanished:
                    return vanished
                return MissingObjectError(
                    f"{name} is not in the store {self.root}.",
                    kept="Nothing was changed.",
                    next_step="Where the folder is synced it may still arrive; if not, run"
                    " `hpkfs fsck` on the store.",
                )
            case errno.EISDIR | errno.ELOOP | errno.ENXIO:
                return self._no_file(name)
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return AuthorisationError(
                    f"The store {self.root} does not let this user at {name}: {error.strerror}.",
                    kept=safe,
                    next_step="Make the store's directory readable and writable for you, then run"
                    " `hpkfs sync`.",
                )
            case errno.ENOSPC | errno.EDQUOT:
                return QuotaError(
                    f"The disk of the store {self.root} is full.",
                    kept=safe,
                    next_step="Free space there, then run `hpkfs sync`.",
                )
            case number if number in _LACKS_LOCKS:
                return AuthorisationError(
                    f"The disk of the store {self.root} has no file locks: {error.strerror}.",
                    kept=safe,
                    next_step="Put the store on a disk where flock(2) works.",
                )
            case _:
                return TransientError(
                    f"The disk of the store {self.root} failed at {name}: {error.strerror}.",
                    kept=safe,
                    next_step="It is tried again by itself.",
                )


def _is_snapshot(name: str) -> bool:
    try:
        check_name(f"snapshots/{name}")
    except HpkfsError:
        return False
    return True
