"""Sealed becomes published: objects first, then the snapshot, the head last.

Called by `mount.py` on its timer and by `sync` and unmount. Checkpoints go oldest first, each
whole, so the store's history has every one. A checkpoint's bytes leave `pending/` only after the
head that names it was read back; until then they are never touched.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from hpkfs.core.documents import Head, Reference, encode_head, parse_snapshot
from hpkfs.errors import ConflictError, IntegrityError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpkfs.core.documents import Snapshot
    from hpkfs.journal import Checkpoint, Journal
    from hpkfs.objects import ObjectStore

log = logging.getLogger(__name__)

UPLOADS_MAX = 16
ANCESTORS_MAX = 1_000
META_CONFLICT = "conflict"
META_HEAD = "head"
META_SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is sealed and not yet on the store."""

    checkpoints: int
    objects: int
    bytes: int
    oldest: str | None


class Publisher:
    """Sends the pending checkpoints of one journal."""

    def __init__(
        self,
        journal: Journal,
        objects: ObjectStore,
        *,
        pending_folder: str,
        owner_id: str,
        mend: Callable[[str], bytes | None],
    ) -> None:
        self._journal = journal
        self._mend = mend
        self._objects = objects
        self._pending = pending_folder
        self._owner_id = owner_id
        self._lock = trio.Lock()

    def waiting(self) -> Waiting:
        """Count what waits."""
        rows = self._journal.checkpoints(state="pending")
        objects = size = 0
        for row in rows:
            folder = os.path.join(self._pending, row.snapshot_id, "objects")
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        objects += 1
                        size += entry.stat().st_size
            except FileNotFoundError:
                continue
        return Waiting(len(rows), objects, size, rows[0].created_at if rows else None)

    def waiting_objects(self) -> set[str]:
        """Names of the objects of which the only copy is here."""
        found: set[str] = set()
        for row in self._journal.checkpoints(state="pending"):
            folder = os.path.join(self._pending, row.snapshot_id, "objects")
            found.update(f"objects/{name}" for name in _names(folder))
        return found

    async def publish(self) -> list[str]:
        """Send every pending checkpoint.

        Returns:
            The ids published by this call. Each is durable on the store.

        Raises:
            ConflictError: the head is not the parent; nothing was overwritten.
            TransientError, QuotaError, AuthorisationError: what was not sent waits.
        """
        done: list[str] = []
        async with self._lock:
            for row in self._journal.checkpoints(state="pending"):
                await self._publish_one(row)
                done.append(row.snapshot_id)
        return done

    async def _publish_one(self, row: Checkpoint) -> None:
        folder = os.path.join(self._pending, row.snapshot_id)
        found = await self._objects.get_head(self._owner_id)
        head_bytes = None if found is None else found[1]
        if found is not None and self._is(found[0], row):
            # An earlier attempt got this far; the same head again makes it durable for sure.
            await self._objects.swap_head(head_bytes, found[1])
            await self._acknowledge(row, folder)
            return
        if found is not None and await self.builds_on(found[0], row):
            await self._acknowledge(row, folder)  # its daemon was killed before it noted that
            return
        self._check_parent(row, None if found is None else found[0])
        document = await trio.to_thread.run_sync(_read, os.path.join(folder, "snapshot.json"))
        if hashlib.sha256(document).hexdigest() != row.sha256:
            raise IntegrityError(
                f"The sealed checkpoint {row.snapshot_id} is damaged on this machine.",
                kept="The store was not changed, and your files are in the mount as they were.",
                next_step="Run `hpkfs fsck` on the state directory.",
            )
        # Its objects are asked for before they are sent, if an earlier attempt may have sent some.
        again = self._journal.get_meta(META_SENDING) == row.snapshot_id
        self._journal.set_meta(META_SENDING, row.snapshot_id)
        names = await self._new_names(document)
        await self._send_objects(os.path.join(folder, "objects"), names, again=again)
        await self._objects.put_snapshot(row.snapshot_id, document)
        reference = row.reference
        head = Head("agent", self._owner_id, reference.snapshot_id, reference.sha256)
        await self._objects.swap_head(head_bytes, encode_head(head))
        await self._acknowledge(row, folder)
        log.info("published checkpoint %s", row.snapshot_id)

    async def _new_names(self, document: bytes) -> list[str]:
        """Objects that a checkpoint names and its parent does not; the store must have each."""
        snapshot = parse_snapshot(document)
        known: set[str] = set()
        if snapshot.parent is not None:
            parent, _document = await self._objects.get_snapshot(
                snapshot.parent, owner_id=self._owner_id
            )
            known = _object_names(parent)
        return sorted(_object_names(snapshot) - known)

    async def _send_objects(self, folder: str, names: list[str], *, again: bool) -> None:
        limiter = trio.CapacityLimiter(UPLOADS_MAX)
        failures: list[Exception] = []

        async def send(name: str) -> None:
            async with limiter:
                if failures:
                    return
                try:
                    await self._send_object(folder, name, again=again)
                except Exception as error:  # noqa: BLE001 - the first one is raised below
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(send, name)
        if failures:
            raise failures[0]

    async def _send_object(self, folder: str, name: str, *, again: bool) -> None:
        """Send one object, unless the store has it; a lost copy is made again from the tree.

        Raises:
            IntegrityError: it is nowhere; the head is not moved to a checkpoint that lacks it.
        """
        try:
            path = os.path.join(folder, name.removeprefix("objects/"))
            data = await trio.to_thread.run_sync(_read, path)
            await self._objects.put(name, data, ask_first=again)
        except IntegrityError:
            if await self._objects.has(name):
                return
            mended = self._mend(name)
            if mended is None:
                raise
            log.warning("the sealed copy of %s was damaged; the tree still had its bytes", name)
            await self._objects.put(name, mended)

    def _is(self, head: Head, row: Checkpoint) -> bool:
        return (head.snapshot_id, head.sha256) == (row.snapshot_id, row.sha256)

    async def builds_on(self, head: Head, row: Checkpoint) -> bool:
        """Whether a head made elsewhere has this checkpoint among its newest ancestors."""
        wanted, start = (row.snapshot_id, row.sha256), (row.parent_id, row.parent_sha256)
        reference: Reference | None = Reference(head.snapshot_id, head.sha256)
        for _ in range(ANCESTORS_MAX):
            if reference is None or (reference.snapshot_id, reference.sha256) == start:
                return False
            if (reference.snapshot_id, reference.sha256) == wanted:
                return True
            snapshot, _document = await self._objects.get_snapshot(
                reference, owner_id=self._owner_id
            )
            reference = snapshot.parent
        return False

    def _check_parent(self, row: Checkpoint, head: Head | None) -> None:
        expected = (row.parent_id, row.parent_sha256)
        actual = (None, None) if head is None else (head.snapshot_id, head.sha256)
        if head is None and row.parent_id is not None:
            raise store_is_empty()
        if head is not None and expected != actual:
            raise self.conflict(head.snapshot_id, row)

    def conflict(self, theirs: str, row: Checkpoint) -> ConflictError:
        """The sentences of a head that moved elsewhere; the state stays until it is resolved."""
        with self._journal.transaction():
            self._journal.set_meta(META_CONFLICT, theirs)
            self._journal.set_meta(META_HEAD, theirs)
        return ConflictError(
            f"The store's checkpoint is now {theirs}, made elsewhere.",
            kept=(
                f"Nothing was overwritten: theirs is on the store, yours is in {self._pending}"
                f" (newest {row.snapshot_id}) and in the mount."
            ),
            next_step=(
                "Work on. A read-only mount of the store shows theirs; what you need of it can be"
                " copied."
            ),
        )

    def lost_update(self, theirs: str, row: Checkpoint) -> ConflictError:
        """The sentences of a head that replaced ours without knowing it."""
        with self._journal.transaction():
            self._journal.set_meta(META_CONFLICT, theirs)
            self._journal.set_meta(META_HEAD, theirs)
        return ConflictError(
            f"The store's checkpoint {theirs} was made elsewhere without knowing of"
            f" {row.snapshot_id}, which this machine had published.",
            kept="Nothing was overwritten here: yours is in the mount, and on the store as well.",
            next_step=(
                "Work on. A read-only mount of the store shows theirs; what you need of it can be"
                " copied."
            ),
        )

    async def _acknowledge(self, row: Checkpoint, folder: str) -> None:
        with self._journal.transaction():
            self._journal.set_checkpoint_state(row.snapshot_id, "published")
            self._journal.set_meta(META_CONFLICT, None)
            self._journal.set_meta(META_HEAD, row.snapshot_id)
            self._journal.set_meta("last_published", row.created_at)
        await trio.to_thread.run_sync(self._journal.sync)
        await trio.to_thread.run_sync(_remove, folder)


def store_is_empty() -> TransientError:
    """A store that has lost its head is most often a disk that is not mounted."""
    return TransientError(
        "The store has no head, although this machine knows checkpoints of it.",
        kept="Your work is safe on this machine.",
        next_step="Bring the store back (is its disk mounted?); it is tried again by itself.",
    )


def _object_names(snapshot: Snapshot) -> set[str]:
    return {piece.object for record in snapshot.files.values() for piece in record.pieces}


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as source:
            return source.read()
    except FileNotFoundError as error:
        raise IntegrityError(
            f"{path} is missing on this machine.",
            kept="The store was not changed.",
            next_step="Run `hpkfs fsck` on the state directory.",
        ) from error


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
