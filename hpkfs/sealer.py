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

from hpkfs import conversations
from hpkfs.content import pwrite_all
from hpkfs.core import attributes as sidecar
from hpkfs.core import config
from hpkfs.core.canonical import encode
from hpkfs.core.chunks import extension_for
from hpkfs.core.documents import (
    HERMES_RUNTIME,
    FileRecord,
    Piece,
    Reference,
    Snapshot,
    encode_snapshot,
    parse_snapshot,
    record_to_json,
)
from hpkfs.core.ids import Digest, format_timestamp, make_id
from hpkfs.core.limits import MAX_FILES, MAX_SNAPSHOT, MAX_TOTAL, PIECE_SIZE
from hpkfs.core.paths import DATABASE, PORTABLE, SIDECAR, START, to_local
from hpkfs.core.policy import EMPTY_IGNORE, looks_like_private_key, parse_ignore
from hpkfs.core.portable import DEFAULT, encode_portable
from hpkfs.core.start import encode_start
from hpkfs.errors import HpkfsError, QuotaError
from hpkfs.inodes import DIRTY, HYDRATED, Inode
from hpkfs.refresher import (
    META_ATTRIBUTES,
    META_CONFIG,
    META_DATABASE_DIGEST,
    META_PORTABLE,
    META_START,
    checkpoint_row,
    default_mode,
    visible_files,
)
from hpkfs.survey import Found, Kept, Survey, shown, survey
from hpkfs.volume import DATABASE_SIDECARS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpkfs.content import FileCut
    from hpkfs.core.portable import Portable
    from hpkfs.durable import Disk
    from hpkfs.objects import ObjectStore
    from hpkfs.refresher import Installer
    from hpkfs.volume import Volume

log = logging.getLogger(__name__)

# Dirty files up to this size are read within the cut itself, as long as they stay within the sum.
INLINE_BYTES_MAX = 256 * 1024
INLINE_SUM_MAX = 64 * 1024 * 1024
KEY_PROBE_BYTES = 256
SUPER_JOURNAL_TRIES = 20
SUPER_JOURNAL_WAIT_S = 0.05
SQLITE_MAGIC = b"SQLite format 3\0"
SNAPSHOT_HEADROOM_BYTES = 2_048
IGNORE_PATH = "workspace/.pubkyignore"
IGNORE_BYTES_MAX = 65_536

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
        return survey(self._volume, stored=stored, mountpoints=self._mountpoints)

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
        await trio.to_thread.run_sync(_empty_folder, staging)
        # The cut: nothing from here to the end of `_cut` awaits.
        volume = self._volume
        since = volume.changed_since
        work = _Work(self, staging, waiting)
        work.cut()
        volume.changed_since = None  # what changes from here on is for the next seal
        try:
            try:
                await work.store_files()
                await work.store_database()
                await work.store_settings()
            finally:
                work.end()
            result = await self._finish(work)
        except BaseException:
            volume.changed_since = since
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
        for logical, entry in self.survey().files.items():
            sidecars = self.sidecars(entry.inode) if logical == DATABASE else []
            changed = entry.inode.dirty or any(inode.dirty for inode in sidecars)
            if changed and entry.inode.absent:
                inode = self._volume.get(entry.inode.ino)
                try:
                    await self._volume.content.hydrate(inode)
                except (HpkfsError, OSError) as error:
                    log.info("%s waits for its missing chunks: %s", entry.path, error)
                if inode.absent:
                    waiting.append(entry.path)
        return tuple(waiting)

    def sidecars(self, inode: Inode) -> list[Inode]:
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

    async def _finish(self, work: _Work) -> SealResult:
        files, attributes = work.assemble()
        base = work.base
        self._set_corrupt(work.corrupt)
        if base is not None and files == base.files:
            with self._journal.transaction():
                self._journal.seal_log(base.snapshot_id, work.log_id)
                work.settle()
            self._journal.set_json(META_KEPT_LOCAL, [[k.path, k.reason] for k in work.kept()])
            await trio.to_thread.run_sync(_empty_folder, work.staging)
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

    def _compose(self, work: _Work, files: dict[str, FileRecord]) -> Snapshot:
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
        if (entry := survey.files.get(DATABASE)) is not None:
            dirty += [os.fsdecode(i.name or b"") for i in self.sidecars(entry.inode) if i.dirty]
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


class _Work:
    """One seal under way: the cut, then what became of each file."""

    def __init__(self, sealer: Sealer, staging: str, waiting: tuple[str, ...]) -> None:
        self._sealer = sealer
        self._volume = sealer.volume
        self._journal = sealer.volume.journal
        self.staging = staging
        self.waiting = waiting
        base = sealer.installer.base()
        self.base = base[0] if base else None
        self.base_document = base[1] if base else None
        self.attributes = sealer.installer.base_attributes()
        self.corrupt: str | None = sealer.corrupt
        self.portable: Portable | None = None
        self.log_id = 0
        self._survey = Survey()
        self._kept: list[Kept] = []
        self._inline: dict[str, bytes] = {}
        self._cuts: dict[int, FileCut] = {}
        self._new: dict[str, FileRecord] = {}
        self._sealed: list[Found] = []
        self._known = self._known_objects()
        self._files: dict[str, FileRecord] = {}
        self._database: list[Found] = []
        self._generations: list[tuple[Inode, int]] = []
        self._database_base: tuple[FileRecord | None, bytes] = (None, b"")
        self._base_digest = self._journal.get_meta(META_DATABASE_DIGEST)
        self._digest: str | None = None
        self._database_done = False
        self._config: bytes | None = None
        self._config_digest: str | None = None

    def _known_objects(self) -> set[str]:
        if self.base is None:
            return set()
        return {p.object for record in self.base.files.values() for p in record.pieces}

    def kept(self) -> list[Kept]:
        """What stays local and why."""
        return sorted([*self._survey.kept, *self._kept], key=lambda kept: kept.path)

    # -- the cut: synchronous -------------------------------------------------------------

    def cut(self) -> None:
        """Freeze what changed, as of now."""
        self._survey = self._sealer.survey()
        self.log_id = self._journal.last_log_id()
        total = 0
        for logical, entry in self._survey.files.items():
            if logical == DATABASE:
                self._cut_database(entry)
                continue
            if entry.path in self.waiting or not _has_new_bytes(entry.inode):
                continue
            inode = self._volume.get(entry.inode.ino)
            sidecars = self._sealer.sidecars(entry.inode)
            if not sidecars and inode.size <= INLINE_BYTES_MAX and total < INLINE_SUM_MAX:
                data = os.pread(self._volume.content.fd(inode), inode.size, 0)
                if not data.startswith(SQLITE_MAGIC):
                    self._inline[logical] = data
                    total += len(data)
                    continue
            entry.sidecars = sidecars
            for one in (inode, *sidecars):
                if one.ino not in self._cuts:
                    self._cuts[one.ino] = self._volume.content.cut(one)
        self._cut_config()

    def _cut_database(self, entry: Found) -> None:
        sidecars = self._sealer.sidecars(entry.inode)
        changed = entry.inode.dirty or any(inode.dirty for inode in sidecars)
        if not changed or entry.path in self.waiting:
            return
        inode = self._volume.get(entry.inode.ino)
        if inode.absent:
            self.waiting = (*self.waiting, entry.path)
            return
        entry.inode = inode
        entry.sidecars = sidecars
        self._database_base = (inode.record, bytes(inode.states))
        for one in (inode, *sidecars):
            self._cuts[one.ino] = self._volume.content.cut(one)
        self._database = [entry]
        self._generations = [(one, one.generation) for one in (inode, *sidecars)]

    def _cut_config(self) -> None:
        try:
            inode = self._volume.resolve("config.yaml")
        except FileNotFoundError:
            return
        if inode.is_file and not inode.absent and inode.size <= 1 << 20:
            self._config = os.pread(self._volume.content.fd(inode), inode.size, 0)

    # -- storing: in threads --------------------------------------------------------------

    async def store_files(self) -> None:
        """Turn every changed file into a record and its objects."""
        inline = [(logical, data) for logical, data in self._inline.items()]
        if inline:
            records = await trio.to_thread.run_sync(self._store_inline, inline)
            self._new.update(records)
        for logical, entry in self._survey.files.items():
            if logical == DATABASE or entry.inode.ino not in self._cuts:
                continue
            cut = self._cuts[entry.inode.ino]
            image = os.path.join(self.staging, "image")
            path = os.path.join(image, "file")
            await trio.to_thread.run_sync(_empty_folder, image)
            await cut.copy_to(path)
            await self._copy_sidecars(entry, path)
            try:
                record = await trio.to_thread.run_sync(self._store_image, logical, path)
            except HpkfsError as error:
                self._fail(entry, f"cannot be captured: {error.happened}")
                continue
            if record is None:
                self._fail(entry, "holds a private key")
            else:
                self._new[logical] = record
        for logical in self._inline.keys() | self._new.keys():
            if logical in self._survey.files:
                self._sealed.append(self._survey.files[logical])

    async def _copy_sidecars(self, entry: Found, path: str) -> None:
        for inode in entry.sidecars:
            name = os.fsdecode(inode.name or b"")
            suffix = "-wal" if name.endswith("-wal") else "-journal"
            await self._cuts[inode.ino].copy_to(path + suffix)

    def _fail(self, entry: Found, reason: str) -> None:
        """One file stays local; what the store holds of it is carried forward."""
        self._kept.append(Kept(shown(entry.path), reason))
        self._survey.files.pop(entry.logical, None)

    def _store_inline(self, inline: list[tuple[str, bytes]]) -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}
        for logical, data in inline:
            entry = self._survey.files[logical]
            if looks_like_private_key(data[:KEY_PROBE_BYTES]):
                self._fail(entry, "holds a private key")
                continue
            executable = bool(entry.mode & 0o100)
            records[logical] = self._store_bytes(logical, data, executable=executable)
        return records

    def _store_bytes(self, logical: str, data: bytes, *, executable: bool) -> FileRecord:
        digest = Digest(hashlib.sha256(data).hexdigest())
        if not data:
            return FileRecord(digest, 0, executable, ())
        piece = Piece(digest, len(data), extension_for(logical, len(data)))
        self._store_object(piece, data)
        return FileRecord(digest, len(data), executable, (piece,))

    def _store_object(self, piece: Piece, data: bytes) -> None:
        if piece.object in self._known:
            return
        with open(os.path.join(self.staging, piece.object), "wb") as out:
            out.write(data)
        self._known.add(piece.object)

    def _store_image(self, logical: str, path: str) -> FileRecord | None:
        """Hash and split a private copy; None when it holds a private key."""
        with open(path, "rb") as source:
            head = source.read(max(KEY_PROBE_BYTES, len(SQLITE_MAGIC)))
        if looks_like_private_key(head[:KEY_PROBE_BYTES]):
            return None
        if head.startswith(SQLITE_MAGIC):
            folder, name = os.path.split(path)
            conversations.seal_database(folder, name, workspace=(), hermes=False)
        entry = self._survey.files[logical]
        return self.split(logical, path, executable=bool(entry.mode & 0o100))

    def split(self, logical: str, path: str, *, executable: bool) -> FileRecord:
        """Hash a file whole and by piece; pieces the base does not know are staged."""
        whole = hashlib.sha256()
        pieces: list[Piece] = []
        size = os.stat(path).st_size
        extension = extension_for(logical, size)
        with open(path, "rb") as source:
            while data := source.read(PIECE_SIZE):
                whole.update(data)
                digest = Digest(hashlib.sha256(data).hexdigest())
                piece = Piece(digest, len(data), extension)
                self._store_object(piece, data)
                pieces.append(piece)
        return FileRecord(Digest(whole.hexdigest()), size, executable, tuple(pieces))

    # -- the conversation database --------------------------------------------------------

    async def store_database(self) -> None:
        """Seal the conversation database from its image; a failure keeps its last record."""
        if not self._database:
            return
        entry = self._database[0]
        for attempt in range(SUPER_JOURNAL_TRIES):
            image = os.path.join(self.staging, "image")
            path = os.path.join(image, "state.db")
            await trio.to_thread.run_sync(_empty_folder, image)
            await self._cuts[entry.inode.ino].copy_to(path)
            await self._copy_sidecars(entry, path)
            self._end_cuts([entry.inode, *entry.sidecars])
            await self._find_base_digest(path)
            try:
                record = await trio.to_thread.run_sync(self._seal_database, image)
            except conversations.SuperJournalError as error:
                if attempt + 1 == SUPER_JOURNAL_TRIES:
                    self._database_failed(error)
                    return
                await trio.sleep(SUPER_JOURNAL_WAIT_S)
                self._cut_database(entry)
                continue
            except QuotaError:
                raise
            except HpkfsError as error:
                self._database_failed(error)
                return
            self.corrupt = None
            self._database_done = True
            if record is not None:
                self._new[DATABASE] = record
            return

    async def _find_base_digest(self, image: str) -> None:
        """Digest of the base's conversation, where this machine has not sealed it itself.

        Merely opening a database changes its first chunk, so only this tells whether anything
        was said. The base is put together from the image's clean chunks and the stored ones.
        """
        base_record, states = self._database_base
        if self._base_digest is not None or base_record is None:
            return
        stored = self.base.files.get(DATABASE) if self.base else None
        if stored is None or stored.sha256 != base_record.sha256:
            return
        folder = os.path.join(self.staging, "base")
        await trio.to_thread.run_sync(_empty_folder, folder)
        path = os.path.join(folder, "state.db")
        await trio.to_thread.run_sync(shutil.copyfile, image, path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            offset = 0
            for piece, state in zip(base_record.pieces, states, strict=True):
                if state == DIRTY:
                    pwrite_all(fd, await self._sealer.objects.get(piece, keep=False), offset)
                offset += piece.size
            os.ftruncate(fd, base_record.size)
        except HpkfsError as error:
            log.info("the stored conversation cannot be compared: %s", error)
            return
        finally:
            os.close(fd)
        try:
            # Normalised like ours: other programs leave in what we clear.
            sealed = await trio.to_thread.run_sync(_seal_base, folder)
            self._base_digest = sealed.logical_digest
        except HpkfsError as error:
            log.info("the stored conversation cannot be compared: %s", error)

    def _seal_database(self, image: str) -> FileRecord | None:
        """Normalise and split; None when the conversation is what the base has."""
        sealed = conversations.seal_database(
            image, "state.db", workspace=self._workspaces(), hermes=True
        )
        for note in sealed.notes:
            self._kept.append(Kept("state.db", note))
        stored = self.base.files.get(DATABASE) if self.base else None
        self._digest = sealed.logical_digest
        if stored is not None and self._base_digest == sealed.logical_digest:
            return None
        return self.split(DATABASE, sealed.path, executable=False)

    def _workspaces(self) -> tuple[str, ...]:
        return tuple(os.path.join(path, "workspace") for path in self._sealer.mountpoints)

    def _database_failed(self, error: HpkfsError) -> None:
        self.corrupt = error.happened
        self._kept.append(Kept("state.db", error.happened))
        self._survey.files.pop(DATABASE, None)

    # -- settings -------------------------------------------------------------------------

    async def store_settings(self) -> None:
        """Read the portable keys out of `config.yaml`; a new agent without one has the defaults."""
        base = self._sealer.installer.base_portable()
        self.portable = base
        found: Portable | None = base
        if self._config is None:
            if self.base is None:
                found = DEFAULT
        else:
            digest = hashlib.sha256(self._config).hexdigest()
            if digest == self._journal.get_meta(META_CONFIG):
                return
            text = self._config.decode("utf-8", "surrogateescape")
            found, problems = await trio.to_thread.run_sync(config.extract, text, base or DEFAULT)
            self._kept.extend(Kept("config.yaml", problem) for problem in problems)
            self._config_digest = digest
        if found is not None and found != base:
            self.portable = found
            data = encode_portable(found)
            self._new[PORTABLE] = self._store_bytes(PORTABLE, data, executable=False)

    # -- the new snapshot -----------------------------------------------------------------

    def assemble(self) -> tuple[dict[str, FileRecord], sidecar.Attributes]:
        """The files of the new snapshot, its sidecar among them."""
        files = self._carried()
        total = sum(record.size for record in files.values())
        length = self._length(files)
        for logical, entry in sorted(
            self._survey.files.items(), key=lambda item: (item[0] not in files, item[0])
        ):
            record = self._record_of(entry)
            if record is None:
                continue
            old = files.get(logical)
            grows = _json_length(logical, record) - (_json_length(logical, old) if old else 0)
            more = record.size - (old.size if old else 0)
            if old is None and len(files) >= MAX_FILES - 1:
                self._overflow(entry, f"there are more than {MAX_FILES} files")
            elif total + more > MAX_TOTAL:
                self._overflow(entry, "all files together exceed what a checkpoint holds")
            elif length + grows > MAX_SNAPSHOT - SNAPSHOT_HEADROOM_BYTES:
                self._overflow(entry, "the list of files is full")
            else:
                files[logical] = record
                total += more
                length += grows
        if PORTABLE in self._new:
            files[PORTABLE] = self._new[PORTABLE]
        attributes = self._attributes(files)
        if attributes != self.attributes:
            self._store_attributes(files, attributes)
        if self.base is None or files != self.base.files:
            self._store_start(files)
        self._files = files
        return files, attributes

    def _overflow(self, entry: Found, reason: str) -> None:
        self._kept.append(Kept(shown(entry.path), f"does not fit: {reason}"))
        self._survey.files.pop(entry.logical)

    def _carried(self) -> dict[str, FileRecord]:
        """Records of the base that stay as they are unless a local file replaces them."""
        if self.base is None:
            return {}
        local = {logical: path for path, (logical, _) in visible_files(self.base).items()}
        carried: dict[str, FileRecord] = {}
        for logical, record in self.base.files.items():
            path = local.get(logical)
            if path is None or logical == DATABASE or self._sealer.holds(path):
                carried[logical] = record
        return carried

    def _record_of(self, entry: Found) -> FileRecord | None:
        """The record that a local file gets; None: what is carried stays."""
        logical = entry.logical
        stored = self.base.files.get(logical) if self.base else None
        record = self._new.get(logical)
        if record is None:
            if logical == DATABASE or entry.path in self.waiting:
                return None
            record = entry.inode.record
            if record is None:
                return None
        executable = bool(entry.mode & 0o100) if logical != DATABASE else False
        if stored is not None and stored.sha256 == record.sha256:
            record = stored
        if record.executable != executable:
            record = replace(record, executable=executable)
        return record

    def _length(self, files: Mapping[str, FileRecord]) -> int:
        return sum(_json_length(path, record) for path, record in files.items())

    def _attributes(self, files: Mapping[str, FileRecord]) -> sidecar.Attributes:
        entries: dict[str, sidecar.Entry] = {}
        for logical, entry in self._survey.files.items():
            record = files.get(logical)
            if record is not None and logical != DATABASE:
                made = self._entry(logical, entry, record)
                if made is not None:
                    entries[logical] = made
        for logical, old in self.attributes.files.items():
            kept = files.get(logical)
            if logical not in self._survey.files and kept is not None:
                entries[logical] = old  # carried forward: a failure, or a name not shown here
        folders = {}
        for logical, entry in self._survey.folders.items():
            mode = stat.S_IMODE(entry.mode) & 0o777
            empty = logical not in self._survey.filled
            if empty or entry.xattrs or mode != default_mode(entry.path, folder=True):
                folders[logical] = sidecar.FolderEntry(mode, _texts(entry.xattrs), empty)
        return sidecar.Attributes(entries, dict(self._survey.links), folders)

    def _entry(self, logical: str, entry: Found, record: FileRecord) -> sidecar.Entry | None:
        """What the sidecar says of a file; None where a reader would guess it right."""
        inode = entry.inode
        mode = stat.S_IMODE(entry.mode) & 0o777
        old = self.attributes.files.get(logical)
        stored = self.base.files.get(logical) if self.base else None
        unchanged = (
            stored is not None
            and stored.sha256 == record.sha256  # else it was moved here, or linked
            and logical not in self._new
            and inode.base_mtime_ns == entry.mtime_ns
            and inode.base_mode == mode
            and not entry.xattrs
        )
        if unchanged and (old is None or old.sha256 == record.sha256):
            return old
        return sidecar.Entry(record.sha256, entry.mtime_ns, mode, _texts(entry.xattrs))

    def _store_attributes(
        self, files: dict[str, FileRecord], attributes: sidecar.Attributes
    ) -> None:
        if not (attributes.files or attributes.links or attributes.folders):
            files.pop(SIDECAR, None)
            return
        data = sidecar.encode_attributes(attributes)
        path = os.path.join(self.staging, "attributes")
        with open(path, "wb") as out:
            out.write(data)
        files[SIDECAR] = self.split(SIDECAR, path, executable=False)
        os.unlink(path)

    def _store_start(self, files: dict[str, FileRecord]) -> None:
        """Take the newest start profile along; it makes no checkpoint by itself."""
        profile = self._journal.get_json(META_START, {})
        known = {path: ranges for path, ranges in profile.items() if path in files}
        if known:
            files[START] = self._store_bytes(START, encode_start(known), executable=False)

    # -- afterwards -----------------------------------------------------------------------

    def settle(self) -> None:
        """Mark clean what did not change since the cut; inside the caller's transaction."""
        for entry in [*self._sealed, *self._touched()]:
            inode = self._volume.inodes.get(entry.inode.ino)
            if inode is None:
                continue
            if inode.generation != entry.generation:
                self._journal.log(time.time_ns(), "write", shown(entry.path), "during a seal")
                continue
            record = self._files.get(entry.logical)
            if record is None or entry.logical not in self._survey.files:
                continue
            if entry.logical in self._new:
                states = bytearray([HYDRATED]) * len(record.pieces)
                if inode.stale:
                    self._volume.content.refresh(inode)
            else:
                states = inode.states
            mode = stat.S_IMODE(inode.mode) & 0o777
            inode.set_record(record, states)
            inode.dirty = 0
            inode.base_mtime_ns, inode.base_mode = inode.mtime_ns, mode
            self._journal.update(
                inode.ino,
                record=inode.record_text,
                states=bytes(states),
                dirty=0,
                size=inode.size,
                mtime_ns=inode.mtime_ns,
                base_mtime_ns=inode.mtime_ns,
                base_mode=mode,
            )
        if self._database_done:
            self._settle_database()
        if self._config_digest is not None:
            self._journal.set_meta(META_CONFIG, self._config_digest)

    def _touched(self) -> list[Found]:
        """Files of which only attributes changed."""
        done = {id(entry) for entry in self._sealed}
        return [
            entry
            for entry in self._survey.files.values()
            if id(entry) not in done
            and entry.logical != DATABASE
            and entry.inode.record_text is not None
            and not entry.inode.dirty
            and (
                entry.inode.base_mtime_ns != entry.inode.mtime_ns
                or entry.inode.base_mode != stat.S_IMODE(entry.inode.mode) & 0o777
            )
        ]

    def _settle_database(self) -> None:
        """The live database is not the sealed one: it only stops being dirty."""
        for inode, generation in self._generations:
            if inode.generation != generation:
                self._journal.log(time.time_ns(), "write", "state.db", "during a seal")
                continue
            inode.dirty = 0
            inode.set_record(None, bytearray())
            self._journal.update(inode.ino, dirty=0, record=None, states=None)
        self._journal.set_meta(META_DATABASE_DIGEST, self._digest)

    def end(self) -> None:
        """Let writers go on unhindered."""
        self._end_cuts([inode for inode in map(self._volume.inodes.get, [*self._cuts]) if inode])

    def _end_cuts(self, inodes: list[Inode]) -> None:
        for inode in inodes:
            if self._cuts.pop(inode.ino, None) is not None:
                self._volume.content.end_cut(inode)


def _has_new_bytes(inode: Inode) -> bool:
    """Whether a file's bytes may be others than those of its record."""
    return bool(inode.dirty) or inode.record_text is None


def _changed(entry: Found, stored: FileRecord | None) -> bool:
    inode = entry.inode
    if stored is None or inode.dirty:
        return True
    mode = stat.S_IMODE(inode.mode) & 0o777
    if entry.logical == DATABASE:
        return False
    return (
        inode.record is None
        or inode.record.sha256 != stored.sha256
        or inode.base_mtime_ns != inode.mtime_ns
        or inode.base_mode != mode
    )


def _json_length(path: str, record: FileRecord) -> int:
    return len(encode(path)) + len(encode(record_to_json(record)))


def _texts(xattrs: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return sidecar.carried_xattrs({os.fsdecode(name): value for name, value in xattrs.items()})


def _seal_base(folder: str) -> conversations.Sealed:
    return conversations.seal_database(folder, "state.db", workspace=(), hermes=True)


def _empty_folder(path: str) -> None:
    """Make a folder empty; a staging folder gets its `objects`."""
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.join(path, "objects") if path.endswith(".new") else path, mode=0o700)
