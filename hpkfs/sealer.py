"""Dirty becomes sealed: a consistent cut of what travels, as objects and one snapshot document.

Called by `mount.py` (timer, `sync`, unmount). A seal takes the cut without awaiting anything, so
it is one instant of the tree; copying, hashing and SQLite run in threads while writers go on.
What is sealed lies in `pending/<snapshot id>/` and is durable, and the chain in the journal is,
before `seal` returns. A failure of one file keeps its last stored record; a failure of the whole
leaves everything as dirty as it was.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from hpkfs.assembly import Assembly
from hpkfs.capture import SQLITE_MAGIC, Capture, empty_folder
from hpkfs.core import attributes as sidecar
from hpkfs.core.documents import (
    HERMES_RUNTIME,
    FileRecord,
    Reference,
    Snapshot,
    encode_snapshot,
    parse_snapshot,
)
from hpkfs.core.ids import Digest, format_timestamp, make_id
from hpkfs.core.paths import DATABASE, to_local
from hpkfs.core.policy import EMPTY_IGNORE, parse_ignore
from hpkfs.core.portable import encode_portable
from hpkfs.errors import HpkfsError
from hpkfs.inodes import ABSENT, UNVERIFIED
from hpkfs.refresher import (
    META_ATTRIBUTES,
    META_PORTABLE,
    checkpoint_row,
    visible_files,
)
from hpkfs.survey import Found, Survey, survey
from hpkfs.volume import DATABASE_SIDECARS

if TYPE_CHECKING:
    from hpkfs.durable import Disk
    from hpkfs.inodes import Inode
    from hpkfs.objects import ObjectStore
    from hpkfs.refresher import Installer
    from hpkfs.volume import Volume

log = logging.getLogger(__name__)

IGNORE_PATH = "workspace/.pubkyignore"
IGNORE_BYTES_MAX = 65_536

SIDECAR_SUFFIXES = ("-wal", "-shm", "-journal")

META_KEPT_LOCAL = "kept_local"
META_CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class SealResult:
    """How a seal ended.

    `snapshot_id` is None where nothing had changed. `waiting` are paths whose change could not be
    sealed yet (absent chunks that cannot be fetched). `corrupt` says why the conversation
    database is not saved.
    """

    snapshot_id: str | None
    waiting: tuple[str, ...] = ()
    corrupt: str | None = None


class Sealer:
    """Makes checkpoints of one volume."""

    def __init__(
        self,
        volume: Volume,
        installer: Installer,
        objects: ObjectStore,
        *,
        pending_folder: str,
        device_id: str,
        mountpoints: tuple[str, ...],
        disk: Disk,
    ) -> None:
        self._volume = volume
        self._journal = volume.journal
        self._installer = installer
        self.objects = objects
        self._pending = pending_folder
        self._device_id = device_id
        self._mountpoints = mountpoints
        self._disk = disk
        self._lock = trio.Lock()
        self.corrupt: str | None = self._journal.get_meta(META_CORRUPT)
        self.waiting: tuple[str, ...] = ()

    def survey(self) -> Survey:
        """What the tree holds for the next snapshot."""
        base = self._installer.base()
        stored = base[0].files if base else {}
        found = survey(self._volume, stored=stored, mountpoints=self._mountpoints)
        if (entry := found.files.get(DATABASE)) is not None:
            entry.sidecars = self._sidecars(entry.inode)
        for logical in [path for path in found.files if path.endswith(SIDECAR_SUFFIXES)]:
            self._pair(found, logical)
        return found

    def _pair(self, found: Survey, logical: str) -> None:
        """Take a `-wal`, `-shm` or `-journal` as a part of the database that it stands beside.

        Where neither changed they stay two files, as another program stored them: without its log
        the stored database would lack what is in it.
        """
        beside = found.files[logical]
        entry = found.files.get(logical.rpartition("-")[0])
        if entry is None or entry.logical == DATABASE or not self._is_database(entry.inode):
            return
        inode = entry.inode
        if not (inode.dirty or beside.inode.dirty or inode.record_text is None):
            return
        del found.files[logical]
        found.beside.add(logical)
        if not logical.endswith("-shm") and beside.inode.size:
            entry.sidecars.append(beside.inode)

    def _is_database(self, inode: Inode) -> bool:
        if not inode.size or (inode.states and inode.states[0] in (ABSENT, UNVERIFIED)):
            return False
        head = os.pread(self._volume.content.fd(inode), len(SQLITE_MAGIC), 0)
        return head == SQLITE_MAGIC

    # -- the seal -------------------------------------------------------------------------

    async def seal(self) -> SealResult:
        """Seal what changed.

        Returns:
            The new checkpoint's id, or None where nothing changed. Durable on return.

        Raises:
            QuotaError: no space for the sealed bytes; nothing was sealed and nothing is lost.
            JournalError: the journal cannot be written.
        """
        async with self._lock:
            return await self._seal()

    async def _seal(self) -> SealResult:
        await self._read_ignore()
        waiting = await self._hydrate_dirty()
        staging = os.path.join(self._pending, ".new")
        await trio.to_thread.run_sync(empty_folder, staging)
        # The cut: nothing from here to the end of `_cut` awaits.
        volume = self._volume
        since = volume.changed_since
        work = Capture(self, staging, waiting)
        try:
            try:
                work.cut()
                volume.changed_since = None  # what changes from here on is for the next seal
                await work.store_files()
                await work.store_database()
                await work.store_settings()
            finally:
                work.end()
            result = await self._finish(work)
        except BaseException:
            volume.changed_since = since if since is not None else volume.changed_since
            # The disk may be full: give back what this try took of it.
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if work.waiting:
            volume.changed_since = volume.changed_last = time.monotonic()
        self.waiting = work.waiting
        return result

    async def _read_ignore(self) -> None:
        """Read `.pubkyignore` again; one that breaks its rules keeps the last good one."""
        try:
            inode = self._volume.resolve(IGNORE_PATH)
            data = await self._volume.read(inode.ino, 0, min(inode.size, IGNORE_BYTES_MAX))
            ignore = parse_ignore(data)
        except FileNotFoundError:
            ignore = EMPTY_IGNORE
        except HpkfsError as error:
            log.info("workspace/.pubkyignore is not used: %s", error.happened)
            return
        if ignore != self._volume.policy.ignore:
            self._volume.set_policy(replace(self._volume.policy, ignore=ignore))

    async def _hydrate_dirty(self) -> tuple[str, ...]:
        """Fetch the rest of every dirty file: its digest needs all bytes."""
        waiting: list[str] = []
        for entry in self.survey().files.values():
            if entry.dirty and entry.inode.absent:
                inode = self._volume.get(entry.inode.ino)
                try:
                    await self._volume.content.hydrate(inode)
                except (HpkfsError, OSError) as error:
                    log.info("%s waits for its missing chunks: %s", entry.path, error)
                if inode.absent:
                    waiting.append(entry.path)
        return tuple(waiting)

    def _sidecars(self, inode: Inode) -> list[Inode]:
        """The `-wal` and `-journal` beside a file, which hold a part of a database's content."""
        parent, name = inode.parent, inode.name
        if parent is None or name is None:
            return []
        found = []
        for suffix in DATABASE_SIDECARS:
            ino = self._journal.lookup(parent, name + suffix)
            if ino is not None:
                beside = self._volume.get(ino)
                if beside.is_file and beside.size:
                    found.append(beside)
        return found

    async def _finish(self, work: Capture) -> SealResult:
        files, attributes = Assembly(self, work).assemble()
        base = work.base
        self._set_corrupt(work.corrupt)
        if base is not None and files == base.files:
            with self._journal.transaction():
                self._journal.seal_log(base.snapshot_id, work.log_id)
                work.settle()
            self._journal.set_json(META_KEPT_LOCAL, [[k.path, k.reason] for k in work.kept()])
            await trio.to_thread.run_sync(empty_folder, work.staging)
            return SealResult(None, work.waiting, work.corrupt)
        snapshot = self._compose(work, files)
        document = encode_snapshot(snapshot)
        # Every rule that a reader enforces is enforced here, before anything is sealed.
        parse_snapshot(document, owner_id=snapshot.owner_id)
        await trio.to_thread.run_sync(self.keep, work.staging, snapshot.snapshot_id, document)
        digest = hashlib.sha256(document).hexdigest()
        upto = work.log_id
        with self._journal.transaction():
            self._journal.add_checkpoint(
                checkpoint_row(snapshot, digest, snapshot.parent, "pending"), document
            )
            self._journal.set_base(snapshot.snapshot_id)
            self._journal.set_meta(META_ATTRIBUTES, sidecar.encode_attributes(attributes).decode())
            if work.portable is not None:
                self._journal.set_meta(META_PORTABLE, encode_portable(work.portable).decode())
            self._journal.set_json(META_KEPT_LOCAL, [[k.path, k.reason] for k in work.kept()])
            self._journal.seal_log(snapshot.snapshot_id, upto)
            work.settle()
        await trio.to_thread.run_sync(self._journal.sync)
        log.info("sealed checkpoint %s", snapshot.snapshot_id)
        return SealResult(snapshot.snapshot_id, work.waiting, work.corrupt)

    def _compose(self, work: Capture, files: dict[str, FileRecord]) -> Snapshot:
        base = work.base
        parent = None
        if base is not None and work.base_document is not None:
            digest = Digest(hashlib.sha256(work.base_document).hexdigest())
            parent = Reference(base.snapshot_id, digest)
        agent_id = self._journal.get_meta("agent_id") or "default"
        return Snapshot(
            kind="agent",
            owner_id=base.owner_id if base else agent_id,
            name=base.name if base else "",
            snapshot_id=make_id(os.urandom(16)),  # type: ignore[arg-type]  # 32 hex digits
            parent=parent,
            created_at=format_timestamp(int(time.time())),
            device_id=self._device_id,
            runtime=HERMES_RUNTIME,
            last_session_id=base.last_session_id if base else None,
            template=base.template if base else None,
            description="",
            files=files,
        )

    def keep(self, staging: str, snapshot_id: str, document: bytes) -> None:
        """Make the staged objects and the document durable under their final name."""
        objects = os.path.join(staging, "objects")
        for name in os.listdir(objects):
            fd = os.open(os.path.join(objects, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.fsync_file(fd, point="pending.object.fsync")
            finally:
                os.close(fd)
        self._disk.fsync_folder(objects, point="pending.objects.fsync")
        for name in ("base", "image"):
            shutil.rmtree(os.path.join(staging, name), ignore_errors=True)
        self._disk.write_atomic(
            os.path.join(staging, "snapshot.json"), document, point="pending.snapshot"
        )
        target = os.path.join(self._pending, snapshot_id)
        self._disk.rename(staging, target, point="pending.rename")
        self._disk.fsync_folder(self._pending, point="pending.folder.fsync")

    def _set_corrupt(self, reason: str | None) -> None:
        if reason != self.corrupt:
            self.corrupt = reason
            self._journal.set_meta(META_CORRUPT, reason)
            if reason is not None:
                log.error("the conversation is NOT saved: %s", reason)

    # -- for status -----------------------------------------------------------------------

    def dirty_paths(self) -> list[str]:
        """Paths that differ from the last seal, by the journal alone."""
        base = self._installer.base()
        stored = base[0].files if base else {}
        survey = self.survey()
        dirty = [
            entry.path
            for logical, entry in survey.files.items()
            if _changed(entry, stored.get(logical))
        ]
        shown_paths = visible_files(base[0]) if base else {}
        gone = {path for path in shown_paths if path != "state.db" and not self.holds(path)}
        attributes = self._installer.base_attributes()
        links = {p for p in survey.links if attributes.links.get(p) != survey.links[p]}
        links |= attributes.links.keys() - survey.links.keys()
        return sorted(set(dirty) | gone | {to_local(path) or path for path in links})

    def holds(self, path: str) -> bool:
        """Whether a path of the base is still in the tree, so that its record is to be kept.

        What the user lists in `.pubkyignore` leaves the next snapshot by the user's act.
        """
        ignore = self._volume.policy.ignore
        if path.startswith("workspace/") and ignore.covers(path.removeprefix("workspace/")):
            return False
        try:
            return self._volume.resolve(path).is_file
        except OSError:
            return False

    @property
    def pending_folder(self) -> str:
        """Where sealed and unpublished checkpoints lie."""
        return self._pending

    @property
    def mountpoints(self) -> tuple[str, ...]:
        """Where the tree is and was mounted; paths below these get markers in the database."""
        return self._mountpoints

    @property
    def volume(self) -> Volume:
        """The tree that is sealed."""
        return self._volume

    @property
    def installer(self) -> Installer:
        """What knows the base."""
        return self._installer


def _changed(entry: Found, stored: FileRecord | None) -> bool:
    if stored is None or entry.dirty:
        return True
    inode = entry.inode
    if entry.logical == DATABASE or (inode.record is None and entry.sidecars):
        return False  # what was sealed is not the live file
    return (
        inode.record is None
        or inode.record.sha256 != stored.sha256
        or inode.base_mtime_ns != inode.mtime_ns
        or inode.base_mode != stat.S_IMODE(inode.mode) & 0o777
    )
