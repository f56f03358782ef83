"""A store in a directory: the embedded default, and a shared disk or a synced folder.

Writers exclude each other by `flock` on `head.lock`, which a kill frees. A synced folder has no
mutual exclusion: there a second writer is only detected, and the copies that a sync program
makes of a conflicting head are named by `conflict_copies`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from typing import TYPE_CHECKING, TypeVar

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
from hpkfs.transport.base import HEAD_NAME, Capabilities, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpkfs.durable import Disk

LOCK_NAME = "head.lock"
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02
_CONFLICT_COPY = re.compile(r"head(?! *\.json$).*\.json(?:\..*)?|head\.json\..*")
_T = TypeVar("_T")


class LocalTransport:
    """The store in one directory."""

    def __init__(self, root: str, *, create: bool = False, disk: Disk | None = None) -> None:
        self.root = root
        self._disk: Disk = RealDisk() if disk is None else disk
        if create:
            with self._told(""):
                for name in ("", "snapshots", "objects"):
                    os.makedirs(os.path.join(root, name), exist_ok=True)

    @property
    def capabilities(self) -> Capabilities:
        """A directory excludes writers on one machine and on a shared disk."""
        return Capabilities(writable=True, locks=True, watch=False)

    async def get(self, name: str, *, limit: int) -> bytes:
        """See `Transport`."""
        return await self._in_thread(self.read, name, limit)

    def read(self, name: str, limit: int) -> bytes:
        """`get` for a caller that is in a thread already."""
        with self._told(name), open(self._path(name), "rb") as source:
            data = source.read(limit + 1)
        if len(data) > limit:
            raise IntegrityError(
                f"{name} in {self.root} is longer than the {limit} bytes that it may have.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store.",
            )
        return data

    async def exists(self, name: str) -> bool:
        """See `Transport`."""
        return await self._in_thread(self._exists, name)

    def _exists(self, name: str) -> bool:
        with self._told(name):
            try:
                os.stat(self._path(name))
            except FileNotFoundError:
                self._check_root()
                return False
        return True

    async def put(self, name: str, data: bytes) -> None:
        """See `Transport`."""
        await self._in_thread(self._put, name, data)

    def _put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._told(name):
            try:
                self._disk.write_atomic(path, data, mode=0o644, point="store.object")
            except FileNotFoundError:
                self._check_root()
                os.makedirs(os.path.dirname(path), exist_ok=True)
                self._disk.write_atomic(path, data, mode=0o644, point="store.object")

    async def list_snapshots(self) -> list[str]:
        """See `Transport`."""
        return await self._in_thread(self._list)

    def _list(self) -> list[str]:
        with self._told("snapshots"):
            names = os.listdir(os.path.join(self.root, "snapshots"))
        return sorted(n.removesuffix(".json") for n in names if _is_snapshot(n))

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """See `Transport`."""
        # Waiting for another writer's lock can be given up; the swap itself runs to its end.
        await self._in_thread(self._swap, expected, new)

    def _swap(self, expected: bytes | None, new: bytes) -> None:
        path = self._path(HEAD_NAME)
        with self._told(HEAD_NAME), self._locked():
            try:
                with open(path, "rb") as source:
                    current: bytes | None = source.read()
            except FileNotFoundError:
                self._check_root()
                current = None
            if current != expected:
                raise ConflictError(
                    f"The head of {self.root} was moved by someone else.",
                    kept="It was not changed, and your work is safe on this machine.",
                    next_step="Run `hpkfs sync` to see where both versions are.",
                )
            self._disk.write_atomic(path, new, mode=0o644, point="store.head")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the head; a killed holder's lock is free at once."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(os.path.join(self.root, LOCK_NAME), flags, 0o644)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise TransientError(
                            f"Another writer has held the head of {self.root} for"
                            f" {LOCK_TIMEOUT_S:.0f} s.",
                            kept="Your work is safe on this machine.",
                            next_step="It is tried again by itself.",
                        ) from error
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(fd)

    def conflict_copies(self) -> list[str]:
        """Names of copies of the head that a sync program made beside it."""
        with self._told("head.json"):
            return sorted(name for name in os.listdir(self.root) if _CONFLICT_COPY.fullmatch(name))

    async def aclose(self) -> None:
        """Nothing is held open."""

    # -- helpers --------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        return await trio.to_thread.run_sync(call, *args)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))

    def _check_root(self) -> None:
        """Tell a store that vanished apart from a name that is not there.

        Raises:
            TransientError: the directory is gone, for instance with its disk.
        """
        if not os.path.isdir(self.root):
            raise TransientError(
                f"The store's directory {self.root} is not there.",
                kept="Your work is safe on this machine.",
                next_step="Bring it back (is its disk mounted?); it is tried again by itself.",
            )

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Turn the system's errors into what they mean for a store."""
        try:
            yield
        except HpkfsError:
            raise
        except OSError as error:
            raise self._translate(name, error) from error

    def _translate(self, name: str, error: OSError) -> HpkfsError:
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                with contextlib.suppress(OSError):
                    self._check_root()
                return MissingObjectError(
                    f"{name} is not in the store {self.root}.",
                    kept="Nothing was changed.",
                    next_step="Run `hpkfs fsck` on the store.",
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return AuthorisationError(
                    f"{name} in {self.root}: {error.strerror}.",
                    kept="Your work is safe on this machine.",
                    next_step="Make the store's directory writable for you, then `hpkfs sync`.",
                )
            case errno.ENOSPC | errno.EDQUOT:
                return QuotaError(
                    f"The disk of the store {self.root} is full.",
                    kept="Your work is safe on this machine.",
                    next_step="Free space there, then run `hpkfs sync`.",
                )
            case _:
                return TransientError(
                    f"{name} in {self.root}: {error.strerror}.",
                    kept="Your work is safe on this machine.",
                    next_step="It is tried again by itself.",
                )


def _is_snapshot(name: str) -> bool:
    try:
        check_name(f"snapshots/{name}")
    except HpkfsError:
        return False
    return True
