"""Named disk calls: every call that a promise of durability rests on, with the name of its point.

`RealDisk` is what the program uses. Tests pass another `Disk` that fails, or kills the process,
at a named point; a name that no crash test covers fails the house tests. A name at a call is
`area.what.call`; `write_atomic` takes `area.what` and passes the four points of `ATOMIC_CALLS`.
A full disk is a `QuotaError` and a failed fsync an `IntegrityError`, both with the system's error
as their cause; every other error of the system goes to the caller as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING, Final, Protocol

from hpkfs.errors import IntegrityError, QuotaError

if TYPE_CHECKING:
    from collections.abc import Iterator

# What stands at the calls.
POINTS: Final = frozenset(
    {
        "backing.data.fsync",
        "backing.file.fsync",
        "backing.folder.fsync",
        "grant.file",
        "journal.wal.fsync",
        "pending.folder.fsync",
        "pending.object.fsync",
        "pending.objects.fsync",
        "pending.rename",
        "pending.snapshot",
        "store.folder.fsync",
        "store.head",
        "store.known.fsync",
        "store.object",
    }
)
# Those of `write_atomic`, and what it does in order: a new file, its bytes, its name, the folder.
ATOMIC_POINTS: Final = frozenset({"grant.file", "pending.snapshot", "store.head", "store.object"})
ATOMIC_CALLS: Final = ("write", "fsync", "rename", "folder")
# Everything that `RealDisk.at` may see.
NAMES: Final = (POINTS - ATOMIC_POINTS) | {
    f"{p}.{call}" for p in ATOMIC_POINTS for call in ATOMIC_CALLS
}

TEMPORARY_SUFFIX: Final = ".tmp"


class Disk(Protocol):
    """The calls; each raises `QuotaError` when the disk is full. All block."""

    def fsync_file(self, fd: int, *, point: str) -> None:
        """Make bytes and size of a file durable (fsync(2))."""
        ...

    def fdatasync_file(self, fd: int, *, point: str) -> None:
        """Make the bytes of a file durable, and its size where it changed (fdatasync(2))."""
        ...

    def fsync_folder(self, path: str, *, point: str) -> None:
        """Make the names in a folder durable."""
        ...

    def rename(self, source: str, target: str, *, point: str) -> None:
        """Move a name; durable after `fsync_folder`."""
        ...

    def write_atomic(self, path: str, data: bytes, *, mode: int = 0o600, point: str) -> None:
        """Put a file in place whole; durable on return.

        After an error the file is the old one or the new one, whole; only a return says which.
        A kill may leave `<path>.<random>.tmp` beside it.
        """
        ...


class RealDisk:
    """The calls of the kernel. The point is passed to `at` before each; tests override that."""

    def at(self, point: str) -> None:
        """A named point is about to be passed."""
        assert point in NAMES, f"{point} is no named point"

    def fsync_file(self, fd: int, *, point: str) -> None:
        """See `Disk`."""
        with _told():
            self.at(point)
            os.fsync(fd)

    def fdatasync_file(self, fd: int, *, point: str) -> None:
        """See `Disk`."""
        with _told():
            self.at(point)
            os.fdatasync(fd)

    def fsync_folder(self, path: str, *, point: str) -> None:
        """See `Disk`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync_file(fd, point=point)
        except OSError as error:
            if error.errno != errno.EINVAL:  # fsync(2): this file system cannot, for folders
                raise
        finally:
            os.close(fd)

    def rename(self, source: str, target: str, *, point: str) -> None:
        """See `Disk`."""
        with _told():
            self.at(point)
            os.rename(source, target)

    def write_atomic(self, path: str, data: bytes, *, mode: int = 0o600, point: str) -> None:
        """See `Disk`."""
        assert point in ATOMIC_POINTS, f"{point} is no name of an atomic write"
        beside = f"{path}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        try:
            self._write_new(beside, data, mode=mode, point=point)
            self.rename(beside, path, point=f"{point}.rename")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        self.fsync_folder(os.path.dirname(path), point=f"{point}.folder")

    def _write_new(self, path: str, data: bytes, *, mode: int, point: str) -> None:
        with _told():
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                self.at(f"{point}.write")
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                self.fsync_file(fd, point=f"{point}.fsync")
            finally:
                os.close(fd)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Say what a full or a failing disk means; other errors are the caller's to judge."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaError(
                "The disk is full.",
                kept="Everything written before is safe; this was not done.",
                next_step="Free space, then try again.",
            ) from error
        if error.errno == errno.EIO:
            raise IntegrityError(
                "The disk reported an error while bytes were made durable.",
                kept="The bytes are still where they were written.",
                next_step="Check the disk before you go on.",
            ) from error
        raise
