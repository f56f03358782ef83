"""Objects by digest: verified when read, sent once, cached on disk; the head and snapshots.

Every byte that comes out of here has the size and the digest that its document names. Called by
`content.py`, `publisher.py`, `refresher.py` and the virtual tree. A damaged copy in the cache is
dropped and fetched again; a damaged one on the store is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from typing import TYPE_CHECKING

import trio

from hpkfs.core.documents import Head, Reference, Snapshot, parse_head, parse_snapshot
from hpkfs.core.limits import MAX_HEAD, MAX_SNAPSHOT
from hpkfs.errors import IntegrityError, MissingObjectError
from hpkfs.transport.base import HEAD_NAME
from hpkfs.transport.local import LocalTransport

if TYPE_CHECKING:
    from hpkfs.core.documents import Piece
    from hpkfs.transport.base import Transport

log = logging.getLogger(__name__)

HASH_INLINE_BYTES_MAX = 64 * 1024


class ObjectStore:
    """The objects of one agent: pending ones, cached ones, and those on the store."""

    def __init__(
        self, transport: Transport, *, cache_dir: str, pending_dir: str, cache_bytes: int
    ) -> None:
        self._transport = transport
        self._cache = cache_dir
        self._pending = pending_dir
        self._cache_bytes = cache_bytes
        self._fetching: dict[str, trio.Event] = {}
        self._on_store: set[str] = set()
        self._used_bytes: int | None = None

    # -- objects --------------------------------------------------------------------------

    async def get(self, piece: Piece, *, keep: bool = True) -> bytes:
        """The verified bytes of a piece.

        Args:
            piece: what is wanted.
            keep: put fetched bytes into the cache; a backing file needs no second copy.

        Raises:
            IntegrityError: the store's object is not what its name says.
            MissingObjectError: the store lacks it.
            TransientError: the store did not answer.
        """
        name = piece.object
        while (running := self._fetching.get(name)) is not None:
            await running.wait()  # re-check: what another reader fetched may be in the cache now
        done = self._fetching[name] = trio.Event()
        try:
            data = await trio.to_thread.run_sync(self._get_here, piece)
            if data is None:
                data = await self._transport.get(name, limit=piece.size)
                await self._verify(piece, data)
                if keep:
                    await trio.to_thread.run_sync(self._keep, name, data)
            return data
        finally:
            del self._fetching[name]
            done.set()

    def _get_here(self, piece: Piece) -> bytes | None:
        """Look on this machine, and on a store that is a directory of it; verified."""
        name = piece.object
        with contextlib.suppress(OSError):
            for checkpoint in os.listdir(self._pending):
                path = os.path.join(self._pending, checkpoint, name)
                data = _read(path, piece.size)
                if data is not None and _fits(piece, data):
                    return data
        path = self._cached_path(name)
        data = _read(path, piece.size)
        if data is not None:
            if _fits(piece, data):
                with contextlib.suppress(OSError):
                    os.utime(path)
                return data
            log.info("the cached copy of %s was damaged; it is fetched again", name)
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(self._transport, LocalTransport):
            data = self._transport.read(name, piece.size)
            if not _fits(piece, data):
                raise _damaged(name)
            return data
        return None

    async def _verify(self, piece: Piece, data: bytes) -> None:
        if len(data) > HASH_INLINE_BYTES_MAX:
            good = await trio.to_thread.run_sync(_fits, piece, data)
        else:
            good = _fits(piece, data)
        if not good:
            raise _damaged(piece.object)

    async def has(self, name: str) -> bool:
        """Whether the store has a name."""
        return name in self._on_store or await self._transport.exists(name)

    async def put(self, name: str, data: bytes) -> None:
        """Put an object on the store unless it is there; durable on return."""
        if not await self.has(name):
            await self._transport.put(name, data)
        self._on_store.add(name)

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
        return parse_head(data, owner_id=owner_id), data

    async def get_snapshot(
        self, reference: Reference, *, owner_id: str | None
    ) -> tuple[Snapshot, bytes]:
        """A snapshot, checked against the digest that names it.

        Raises:
            IntegrityError: its bytes have another digest, or break the format.
        """
        name = f"snapshots/{reference.snapshot_id}.json"
        data = await trio.to_thread.run_sync(self._cached_document, name, reference.sha256)
        if data is None:
            data = await self._transport.get(name, limit=MAX_SNAPSHOT)
            if hashlib.sha256(data).hexdigest() != reference.sha256:
                raise IntegrityError(
                    f"The checkpoint {reference.snapshot_id} on the store is not what its digest"
                    " says.",
                    kept="Nothing was changed.",
                    next_step="Run `hpkfs fsck` on the store; restore an earlier checkpoint.",
                )
        snapshot = parse_snapshot(data, owner_id=owner_id)
        if snapshot.snapshot_id != reference.snapshot_id:
            raise IntegrityError(
                f"The store holds the checkpoint {snapshot.snapshot_id} under the name of"
                f" {reference.snapshot_id}.",
                kept="Nothing was changed.",
                next_step="Run `hpkfs fsck` on the store.",
            )
        await trio.to_thread.run_sync(self._keep, name, data)
        return snapshot, data

    def _cached_document(self, name: str, digest: str) -> bytes | None:
        data = _read(self._cached_path(name), MAX_SNAPSHOT)
        if data is not None and hashlib.sha256(data).hexdigest() == digest:
            return data
        return None

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
        if self._used_bytes is None:
            self._used_bytes = sum(size for _, size, _ in self._entries())
        return self._used_bytes

    def evict(self, to_bytes: int) -> int:
        """Drop the least recently used until `to_bytes` are left; returns the bytes freed."""
        freed = 0
        used = self.cached_bytes()
        for _, size, path in sorted(self._entries()):
            if used - freed <= to_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                freed += size
        self._used_bytes = used - freed
        return freed

    def _cached_path(self, name: str) -> str:
        return os.path.join(self._cache, name.removeprefix("objects/").replace("/", "-"))

    def _entries(self) -> list[tuple[float, int, str]]:
        found = []
        with os.scandir(self._cache) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, entry.path))
        return found

    def _keep(self, name: str, data: bytes) -> None:
        """Cache bytes; a full disk or a kill costs nothing but the copy."""
        path = os.path.join(
            self._cache,
            name.removeprefix("objects/")
            if name.startswith("objects/")
            else name.replace("/", "-"),
        )
        if os.path.exists(path):
            return
        beside = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            with open(beside, "wb") as out:
                out.write(data)
            os.rename(beside, path)
        except OSError as error:
            log.info("%s is not cached: %s", name, error)
            with contextlib.suppress(OSError):
                os.unlink(beside)
            return
        self._used_bytes = self.cached_bytes() + len(data)
        if self._used_bytes > self._cache_bytes:
            self.evict(self._cache_bytes * 9 // 10)


def _read(path: str, limit: int) -> bytes | None:
    try:
        with open(path, "rb") as source:
            return source.read(limit + 1)
    except OSError:
        return None


def _fits(piece: Piece, data: bytes) -> bool:
    return len(data) == piece.size and hashlib.sha256(data).hexdigest() == piece.sha256


def _damaged(name: str) -> IntegrityError:
    return IntegrityError(
        f"{name} on the store is not what its name says.",
        kept="Nothing was changed; bytes that are wrong are never shown.",
        next_step="Run `hpkfs fsck` on the store; an earlier checkpoint may hold the file.",
    )
