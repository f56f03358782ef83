"""Objects by digest: verified when read, sent once, cached on disk; the head and snapshots.

Every byte that comes out of here has the size and the digest that its document names, and so has
every byte that goes to the store. Called by `content.py`, `publisher.py`, `refresher.py` and the
virtual tree. A damaged copy in the cache is dropped and fetched again; a damaged one on the store
is an error. For a store in a directory one read is one thread hop: open, read and hash together.

The cache is a convenience: a full disk or a kill costs nothing but copies.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

import trio

from hpkfs.core.chunks import parse_object_name
from hpkfs.core.documents import Head, Reference, Snapshot, parse_head, parse_snapshot
from hpkfs.core.ids import sha256_hex
from hpkfs.core.limits import MAX_HEAD, MAX_SNAPSHOT
from hpkfs.durable import TEMPORARY_SUFFIX
from hpkfs.errors import FormatError, HpkfsError, IntegrityError, MissingObjectError
from hpkfs.transport.base import HEAD_NAME
from hpkfs.transport.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.core.documents import Piece
    from hpkfs.core.ids import Digest, SnapshotId
    from hpkfs.transport.base import Transport

log = logging.getLogger(__name__)

HASH_INLINE_BYTES_MAX: Final = 64 * 1024
EVICT_TO: Final = 0.9  # of the budget, so that not every new object evicts one


class ObjectStore:
    """The objects of one agent: pending ones, cached ones, and those on the store.

    Args:
        transport: the store.
        cache_dir: where verified copies are kept; `snapshots/` in it has documents.
        pending_dir: sealed checkpoints, `<id>/objects/<digest>.<ext>` each; only read here.
        cache_bytes: the budget of the cache.
    """

    def __init__(
        self, transport: Transport, *, cache_dir: str, pending_dir: str, cache_bytes: int
    ) -> None:
        self._transport = transport
        self._local = transport if isinstance(transport, LocalTransport) else None
        self._pending = pending_dir
        self._cache = _Cache(cache_dir, limit_bytes=cache_bytes)
        self._fetches: dict[Piece, _Fetch] = {}

    # -- objects --------------------------------------------------------------------------

    async def get(self, piece: Piece, *, keep: bool = True) -> bytes:
        """The verified bytes of a piece; callers for the same one share one fetch.

        Args:
            piece: what is wanted.
            keep: put fetched bytes into the cache; a backing file needs no second copy. A store
                in a directory is never cached.

        Raises:
            IntegrityError: the store's object is not what its name says.
            MissingObjectError: the store lacks it.
            TransientError: the store did not answer.
        """
        while (running := self._fetches.get(piece)) is not None:
            await running.done.wait()
            if running.data is not None:
                return running.data
            if running.error is not None:
                raise _again(running.error) from running.error
            # re-check: the one who fetched was cancelled, so another caller takes over
        fetch = self._fetches[piece] = _Fetch()
        try:
            fetch.data = await self._fetch(piece, keep=keep)
            return fetch.data
        except HpkfsError as error:
            fetch.error = error
            raise
        finally:
            del self._fetches[piece]
            fetch.done.set()

    async def _fetch(self, piece: Piece, *, keep: bool) -> bytes:
        if self._local is not None:
            return await self._local.ask(self._read_all, piece, self._local)
        data = await trio.to_thread.run_sync(self._read_here, piece)
        if data is None:
            try:
                data = await self._transport.get(piece.object, limit=piece.size)
            except MissingObjectError:
                self._check_sealed(piece.object)
                raise
            if not await _in_thread_if_long(functools.partial(_fits, piece, data), len(data)):
                raise _damaged(piece.object)
            if keep:
                await trio.to_thread.run_sync(self._cache.put, _cached_name(piece.object), data)
        return data

    def _read_all(self, piece: Piece, store: LocalTransport) -> bytes:
        """One thread hop for a store in a directory."""
        data = self._read_here(piece)
        if data is None:
            try:
                data = store.read(piece.object, piece.size)
            except MissingObjectError:
                self._check_sealed(piece.object)
                raise
            if not _fits(piece, data):
                raise _damaged(piece.object)
        return data

    def _read_here(self, piece: Piece) -> bytes | None:
        """Look on this machine; verified."""
        name = piece.object
        for path in self._pending_paths(name):
            data = _read(path, piece.size)
            if data is not None and _fits(piece, data):
                return data
        cached = _cached_name(name)
        data = self._cache.get(cached, piece.size)
        if data is not None and not _fits(piece, data):
            log.info("the cached copy of %s was damaged; it is fetched again", name)
            self._cache.drop(cached)
            return None
        return data

    def _check_sealed(self, name: str) -> None:
        """The store lacks an object: say so if this machine had the only copy, and it is damaged.

        Raises:
            IntegrityError: a sealed copy is here; it was not good, or it would have been used.
        """
        if any(map(os.path.exists, self._pending_paths(name))):
            raise _sealed_damaged(name)

    def _pending_paths(self, name: str) -> list[str]:
        try:
            checkpoints = os.listdir(self._pending)
        except OSError:
            return []
        return [os.path.join(self._pending, checkpoint, name) for checkpoint in checkpoints]

    async def has(self, name: str) -> bool:
        """Whether the store has a name."""
        return await self._transport.exists(name)

    async def put(self, name: str, data: bytes, *, ask_first: bool = True) -> None:
        """Put an object on the store unless it is there; durable on return.

        Args:
            name: `objects/…`.
            data: its bytes.
            ask_first: whether it may be there, so that a question saves sending it.

        Raises:
            IntegrityError: the bytes are not what the name says; nothing was sent.
        """
        digest, _ = parse_object_name(name)
        if not await _in_thread_if_long(lambda: sha256_hex(data) == digest, len(data)):
            raise _sealed_damaged(name)
        # A directory compares the bytes itself: there a name may stand for half an object.
        ask = ask_first and self._local is None
        if not (ask and await self._transport.exists(name)):
            await self._transport.put(name, data)

    # -- documents ------------------------------------------------------------------------

    async def get_head(self, owner_id: str | None) -> tuple[Head, bytes] | None:
        """The head and its bytes; None when the store has none.

        Raises:
            FormatError: it breaks the format, or is of another agent.
        """
        try:
            data = await self._transport.get(HEAD_NAME, limit=MAX_HEAD)
        except MissingObjectError:
            return None
        head = parse_head(data)
        _check_owner(head.owner_id, owner_id)
        return head, data

    async def get_snapshot(
        self, wanted: Reference | SnapshotId, *, owner_id: str | None
    ) -> tuple[Snapshot, bytes]:
        """A snapshot and its bytes.

        Args:
            wanted: with a `Reference` the bytes are checked against its digest, and a copy on this
                machine will do; with an id alone they are always the store's.
            owner_id: the agent it must be of; None for any.

        Raises:
            IntegrityError: its bytes have another digest, or break the format.
            MissingObjectError: the store lacks it.
        """
        snapshot_id = wanted.snapshot_id if isinstance(wanted, Reference) else wanted
        digest = wanted.sha256 if isinstance(wanted, Reference) else None
        name = f"snapshots/{snapshot_id}.json"
        data = None
        if digest is not None:
            data = await trio.to_thread.run_sync(self._cached_document, name, digest)
        if data is None:
            data = await self._transport.get(name, limit=MAX_SNAPSHOT)
        return await trio.to_thread.run_sync(self._parse, snapshot_id, digest, data, owner_id), data

    def _parse(
        self, snapshot_id: SnapshotId, digest: Digest | None, data: bytes, owner_id: str | None
    ) -> Snapshot:
        """Check a document, then keep a copy."""
        if digest is not None and sha256_hex(data) != digest:
            raise IntegrityError(
                f"The checkpoint {snapshot_id} on the store is not what its digest says.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store; restore an earlier checkpoint.",
            )
        snapshot = parse_snapshot(data)
        _check_owner(snapshot.owner_id, owner_id)
        if snapshot.snapshot_id != snapshot_id:
            raise IntegrityError(
                f"The store holds the checkpoint {snapshot.snapshot_id} under the name of"
                f" {snapshot_id}.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store.",
            )
        if digest is not None:
            self._cache.put(f"snapshots/{snapshot_id}.json", data)
        return snapshot

    def _cached_document(self, name: str, digest: Digest) -> bytes | None:
        data = self._cache.get(name, MAX_SNAPSHOT)
        if data is not None and sha256_hex(data) != digest:
            self._cache.drop(name)
            return None
        return data

    async def put_snapshot(self, snapshot_id: str, document: bytes) -> None:
        """Put a snapshot on the store and read it back.

        Raises:
            IntegrityError: what is read back differs; the head was not moved.
        """
        name = f"snapshots/{snapshot_id}.json"
        await self._transport.put(name, document)
        if await self._transport.get(name, limit=MAX_SNAPSHOT) != document:
            raise IntegrityError(
                f"The store returned another document than the checkpoint {snapshot_id} it got.",
                kept="The head was not moved, and your work is safe on this machine.",
                next_step="Run `hpkfs fsck` on the store, then `hpkfs sync`.",
            )

    async def swap_head(self, expected: bytes | None, new: bytes) -> None:
        """Move the head; see `Transport.swap_head`."""
        await self._transport.swap_head(expected, new)

    # -- the cache ------------------------------------------------------------------------

    def cached_bytes(self) -> int:
        """Bytes in the cache."""
        return self._cache.used_bytes()

    def evict(self, to_bytes: int) -> int:
        """Drop the least recently used until `to_bytes` are left; returns the bytes freed."""
        return self._cache.evict(to_bytes)


class _Fetch:
    """One fetch that several callers may wait for. No data and no error: it was cancelled."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.data: bytes | None = None
        self.error: HpkfsError | None = None


class _Cache:
    """Files in a folder, least recently used first out. Blocking; any thread.

    A file's mtime is the time of its last use.
    """

    def __init__(self, folder: str, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used_bytes: int | None = None

    def get(self, name: str, limit: int) -> bytes | None:
        path = os.path.join(self._folder, name)
        data = _read(path, limit)
        if data is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put(self, name: str, data: bytes) -> None:
        path = os.path.join(self._folder, name)
        if len(data) > self._limit_bytes or os.path.exists(path):
            return
        self.used_bytes()  # the first count removes temporary names, so it comes before ours
        beside = f"{path}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(beside, "xb") as out:
                out.write(data)
            with self._lock:
                used = self._used() + (0 if os.path.exists(path) else len(data))
                os.rename(beside, path)
                self._used_bytes = used
        except OSError as error:
            log.info("%s is not cached: %s", name, error.strerror)
            with contextlib.suppress(OSError):
                os.unlink(beside)
            return
        if used > self._limit_bytes:
            self.evict(int(self._limit_bytes * EVICT_TO))

    def drop(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        with self._lock, contextlib.suppress(OSError):
            os.unlink(path)
            self._used_bytes = None  # damage may have changed its size, so all are counted again

    def used_bytes(self) -> int:
        with self._lock:
            return self._used()

    def evict(self, to_bytes: int) -> int:
        with self._lock:
            entries = sorted(self._entries())
            used = sum(size for _, size, _ in entries)
            freed = 0
            for _, size, path in entries:
                if used - freed <= to_bytes:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    freed += size
            self._used_bytes = used - freed
        return freed

    def _used(self) -> int:
        if self._used_bytes is None:
            for _, _, path in self._entries(temporary=True):
                with contextlib.suppress(OSError):
                    os.unlink(path)  # of a writer that was killed; another one caches nothing
            self._used_bytes = sum(size for _, size, _ in self._entries())
        return self._used_bytes

    def _entries(self, *, temporary: bool = False) -> list[tuple[int, int, str]]:
        """Last use, size and path of every file, or of every unfinished one."""
        found: list[tuple[int, int, str]] = []
        for folder in (self._folder, os.path.join(self._folder, "snapshots")):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        is_temporary = entry.name.endswith(TEMPORARY_SUFFIX)
                        if is_temporary == temporary and entry.is_file(follow_symlinks=False):
                            status = entry.stat()
                            found.append((status.st_mtime_ns, status.st_size, entry.path))
        return found


def _cached_name(name: str) -> str:
    return name.removeprefix("objects/")


def _read(path: str, limit: int) -> bytes | None:
    try:
        with open(path, "rb") as source:
            return source.read(limit + 1)
    except OSError:
        return None


def _fits(piece: Piece, data: bytes) -> bool:
    return len(data) == piece.size and sha256_hex(data) == piece.sha256


async def _in_thread_if_long(check: Callable[[], bool], size_bytes: int) -> bool:
    if size_bytes > HASH_INLINE_BYTES_MAX:
        return await trio.to_thread.run_sync(check)
    return check()


def _check_owner(found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise FormatError(
            f"The store holds the agent {found!r} and not {expected!r}.",
            kept="Nothing was changed, neither here nor there.",
            next_step="Check the address; if another agent is meant to lie there now, mount it with"
            " a --state-dir of its own.",
        )


def _again(error: HpkfsError) -> HpkfsError:
    """The same failure for another caller; one exception object has one traceback."""
    return type(error)(error.happened, kept=error.kept, next_step=error.next_step)


def _sealed_damaged(name: str) -> IntegrityError:
    return IntegrityError(
        f"The sealed copy of {name} on this machine is damaged.",
        kept="The store was not changed, and does not have it.",
        next_step="Run `hpkfs fsck` on the state directory.",
    )


def _damaged(name: str) -> IntegrityError:
    return IntegrityError(
        f"{name} on the store is not what its name says.",
        kept="Nothing was changed; bytes that are wrong are never shown.",
        next_step="Run `hpkfs fsck` on the store; an earlier checkpoint may hold the file.",
    )
