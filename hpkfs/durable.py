"""Named disk calls: every call that a promise of durability rests on, with the name of its point.

`RealDisk` is what the program uses. Tests pass another `Disk` that fails, or kills the process,
at a named point; a name that no crash test covers fails the house tests. Names are
`area.what.call`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import Protocol

from hpkfs.errors import IntegrityError, QuotaError

POINTS = frozenset(
    {
        "backing.data.fsync",
        "backing.file.fsync",
        "backing.folder.fsync",
        "journal.wal.fsync",
        "pending.folder.fsync",
        "pending.object.fsync",
        "pending.objects.fsync",
        "pending.rename",
        "pending.snapshot",
        "store.folder.fsync",
        "store.head",
        "store.object",
    }
)


class Disk(Protocol):
    """The calls; each raises `QuotaError` when the disk is full."""

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
        """Put a file in place whole; durable on return. Points: `<point>`, see the source."""
        ...


class RealDisk:
    """The calls of the kernel. The point is passed to `at` before each; tests override that."""

    def at(self, point: str) -> None:
        """A named point is about to be passed."""
        assert point in POINTS, f"{point} is no named point"

    def fsync_file(self, fd: int, *, point: str) -> None:
        """See `Disk`."""
        self.at(point)
        with _full_disk():
            os.fsync(fd)

    def fdatasync_file(self, fd: int, *, point: str) -> None:
        """See `Disk`."""
        self.at(point)
        with _full_disk():
            os.fdatasync(fd)

    def fsync_folder(self, path: str, *, point: str) -> None:
        """See `Disk`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync_file(fd, point=point)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str, *, point: str) -> None:
        """See `Disk`."""
        self.at(point)
        with _full_disk():
            os.rename(source, target)

    def write_atomic(self, path: str, data: bytes, *, mode: int = 0o600, point: str) -> None:
        """See `Disk`: a name beside it, its fsync, the rename, the folder's fsync."""
        beside = f"{path}.{secrets.token_hex(4)}.tmp"
        with _full_disk():
            try:
                fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                    self.fsync_file(fd, point=point)
                finally:
                    os.close(fd)
                self.rename(beside, path, point=point)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
            self.fsync_folder(os.path.dirname(path), point=point)


@contextlib.contextmanager
def _full_disk():  # type: ignore[no-untyped-def]  # a context manager of nothing
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
