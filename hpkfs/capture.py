"""What a seal reads: the cut of what changed, turned into records and staged objects.

Made by `sealer.py` for one seal. `cut` awaits nothing, so all that is captured is of one instant;
the rest copies, hashes and lets SQLite work in threads while writers go on. `settle` marks clean
what did not change meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from typing import TYPE_CHECKING

import trio

from hpkfs import conversations
from hpkfs.content import pwrite_all
from hpkfs.core import config
from hpkfs.core.chunks import extension_for
from hpkfs.core.documents import FileRecord, Piece
from hpkfs.core.ids import Digest
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.core.paths import DATABASE, PORTABLE
from hpkfs.core.policy import looks_like_private_key
from hpkfs.core.portable import DEFAULT, encode_portable
from hpkfs.errors import HpkfsError, QuotaError
from hpkfs.inodes import DIRTY, HYDRATED, Inode
from hpkfs.refresher import META_CONFIG, META_DATABASE_DIGEST
from hpkfs.survey import Found, Kept, Survey, shown

if TYPE_CHECKING:
    from hpkfs.core.portable import Portable
    from hpkfs.cut import FileCut
    from hpkfs.sealer import Sealer

log = logging.getLogger(__name__)

# Dirty files up to this size are read within the cut itself, as long as they stay within the sum.
INLINE_BYTES_MAX = 256 * 1024
INLINE_SUM_MAX = 64 * 1024 * 1024
KEY_PROBE_BYTES = 256
SUPER_JOURNAL_TRIES = 20
SUPER_JOURNAL_WAIT_S = 0.05
SQLITE_MAGIC = b"SQLite format 3\0"


class Capture:
    """One seal under way: the cut, then what became of each file.

    `new` holds the records that were made, by logical path; `files` is what the snapshot will
    hold, once `assembly.py` has decided.
    """

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
        self.survey = Survey()
        self._kept: list[Kept] = []
        self._inline: dict[str, bytes] = {}
        self._cuts: dict[int, FileCut] = {}
        self.new: dict[str, FileRecord] = {}
        self._sealed: list[Found] = []
        self._known = self._known_objects()
        self.files: dict[str, FileRecord] = {}
        self._database: list[Found] = []
        # Inodes that were sealed as an image, and their generations at the cut.
        self._generations: dict[int, int] = {}
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
        return sorted([*self.survey.kept, *self._kept], key=lambda kept: kept.path)

    def keep_local(self, path: str, reason: str) -> None:
        """Note something that stays on this machine."""
        self._kept.append(Kept(shown(path), reason))

    # -- the cut: synchronous -------------------------------------------------------------

    def cut(self) -> None:
        """Freeze what changed, as of now."""
        self.survey = self._sealer.survey()
        self.log_id = self._journal.last_log_id()
        total = 0
        for logical, entry in self.survey.files.items():
            if logical == DATABASE:
                self._cut_database(entry)
                continue
            if entry.path in self.waiting or not self._needs_capture(entry):
                continue
            inode = entry.inode = self._volume.get(entry.inode.ino)
            small = inode.size <= INLINE_BYTES_MAX and total < INLINE_SUM_MAX
            if small and not entry.sidecars:
                data = os.pread(self._volume.content.fd(inode), inode.size, 0)
                if not data.startswith(SQLITE_MAGIC):
                    self._inline[logical] = data
                    total += len(data)
                    continue
            self._cut_entry(entry)
        self._cut_config()

    def _cut_database(self, entry: Found) -> None:
        if not entry.dirty or entry.path in self.waiting:
            return
        inode = entry.inode = self._volume.get(entry.inode.ino)
        if inode.absent:
            self.waiting = (*self.waiting, entry.path)
            return
        self._database_base = (inode.record, bytes(inode.states))
        self._cut_entry(entry)
        self._database = [entry]

    def _cut_entry(self, entry: Found) -> None:
        """Freeze a file and the logs beside it."""
        entry.generation = entry.inode.generation
        entry.sidecars = [self._volume.get(inode.ino) for inode in entry.sidecars]
        for one in (entry.inode, *entry.sidecars):
            if one.ino not in self._cuts:
                self._cuts[one.ino] = self._volume.content.cut(one)
            if entry.sidecars or entry.logical == DATABASE:
                self._generations[one.ino] = one.generation

    def _needs_capture(self, entry: Found) -> bool:
        """Whether a file's bytes may be others than those of the record that it has or had."""
        if entry.dirty:
            return True
        if entry.inode.record_text is not None:
            return False
        known = self.base is not None and entry.logical in self.base.files
        return not (known and entry.sidecars)  # sealed as an image, and nothing changed since

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
            self.new.update(records)
        stored: dict[int, FileRecord | str] = {}
        for logical, entry in list(self.survey.files.items()):
            ino = entry.inode.ino
            if logical == DATABASE or ino not in self._cuts:
                continue
            if ino not in stored:  # a cut is read once; a hard link has the same bytes
                stored[ino] = await self._store_cut(entry)
            record = stored[ino]
            if isinstance(record, str):
                self._fail(entry, record)
            else:
                self.new[logical] = record
        for logical in self._inline.keys() | self.new.keys():
            if logical in self.survey.files:
                self._sealed.append(self.survey.files[logical])

    async def _store_cut(self, entry: Found) -> FileRecord | str:
        """The record of a file's cut, or why it stays local."""
        image = os.path.join(self.staging, "image")
        path = os.path.join(image, "file")
        await trio.to_thread.run_sync(empty_folder, image)
        await self._cuts[entry.inode.ino].copy_to(path)
        await self._copy_sidecars(entry, path)
        try:
            record = await trio.to_thread.run_sync(self._store_image, entry.logical, path)
        except QuotaError:
            raise
        except HpkfsError as error:
            return f"cannot be captured: {error.happened}"
        return "holds a private key" if record is None else record

    async def _copy_sidecars(self, entry: Found, path: str) -> None:
        for inode in entry.sidecars:
            name = os.fsdecode(inode.name or b"")
            suffix = "-wal" if name.endswith("-wal") else "-journal"
            await self._cuts[inode.ino].copy_to(path + suffix)

    def _fail(self, entry: Found, reason: str) -> None:
        """One file stays local; what the store holds of it is carried forward."""
        self.keep_local(entry.path, reason)
        self.survey.files.pop(entry.logical, None)

    def _store_inline(self, inline: list[tuple[str, bytes]]) -> dict[str, FileRecord]:
        records: dict[str, FileRecord] = {}
        for logical, data in inline:
            entry = self.survey.files[logical]
            if looks_like_private_key(data[:KEY_PROBE_BYTES]):
                self._fail(entry, "holds a private key")
                continue
            executable = bool(entry.mode & 0o100)
            records[logical] = self.store_bytes(logical, data, executable=executable)
        return records

    def store_bytes(self, logical: str, data: bytes, *, executable: bool) -> FileRecord:
        """Make the record of a small file, and stage its object unless the base knows it."""
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
        entry = self.survey.files[logical]
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
            await trio.to_thread.run_sync(empty_folder, image)
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
                self.new[DATABASE] = record
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
        await trio.to_thread.run_sync(empty_folder, folder)
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
        stored = self.base.files.get(DATABASE) if self.base else None
        try:
            sealed = conversations.seal_database(
                image, "state.db", workspace=self._workspaces(), hermes=True
            )
        except conversations.EmptyDatabaseError:
            if stored is not None:
                raise
            self.keep_local("state.db", "holds no conversation yet")
            return None
        for note in sealed.notes:
            self.keep_local("state.db", note)
        self._digest = sealed.logical_digest
        if stored is not None and self._base_digest == sealed.logical_digest:
            return None
        return self.split(DATABASE, sealed.path, executable=False)

    def _workspaces(self) -> tuple[str, ...]:
        return tuple(os.path.join(path, "workspace") for path in self._sealer.mountpoints)

    def _database_failed(self, error: HpkfsError) -> None:
        self.corrupt = error.happened
        self.keep_local("state.db", error.happened)
        self.survey.files.pop(DATABASE, None)

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
            self.new[PORTABLE] = self.store_bytes(PORTABLE, data, executable=False)

    # -- afterwards -----------------------------------------------------------------------

    def settle(self) -> None:
        """Mark clean what did not change since the cut; inside the caller's transaction."""
        for entry in [*self._sealed, *self._touched()]:
            if entry.sidecars:
                self._settle_image(entry)
                continue
            inode = self._volume.inodes.get(entry.inode.ino)
            if inode is None:
                continue
            if inode.generation != entry.generation:
                self._journal.log(time.time_ns(), "write", shown(entry.path), "during a seal")
                continue
            record = self.files.get(entry.logical)
            if record is None or entry.logical not in self.survey.files:
                continue
            if entry.logical in self.new:
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
            self._settle_image(self._database[0])
            self._journal.set_meta(META_DATABASE_DIGEST, self._digest)
        if self._config_digest is not None:
            self._journal.set_meta(META_CONFIG, self._config_digest)

    def _touched(self) -> list[Found]:
        """Files of which only attributes changed."""
        done = {id(entry) for entry in self._sealed}
        return [
            entry
            for entry in self.survey.files.values()
            if id(entry) not in done
            and entry.logical != DATABASE
            and entry.inode.record_text is not None
            and not entry.inode.dirty
            and (
                entry.inode.base_mtime_ns != entry.inode.mtime_ns
                or entry.inode.base_mode != stat.S_IMODE(entry.inode.mode) & 0o777
            )
        ]

    def _settle_image(self, entry: Found) -> None:
        """A live database is not the sealed one: it only stops being dirty, with its logs."""
        for inode in (entry.inode, *entry.sidecars):
            if inode.generation != self._generations[inode.ino]:
                self._journal.log(time.time_ns(), "write", shown(entry.path), "during a seal")
                continue
            inode.dirty = 0
            inode.set_record(None, bytearray())
            self._journal.update(inode.ino, dirty=0, record=None, states=None)

    def end(self) -> None:
        """Let writers go on unhindered."""
        self._end_cuts([inode for inode in map(self._volume.inodes.get, [*self._cuts]) if inode])

    def _end_cuts(self, inodes: list[Inode]) -> None:
        for inode in inodes:
            if self._cuts.pop(inode.ino, None) is not None:
                self._volume.content.end_cut(inode)


def _seal_base(folder: str) -> conversations.Sealed:
    return conversations.seal_database(folder, "state.db", workspace=(), hermes=True)


def empty_folder(path: str) -> None:
    """Make a folder empty; a staging folder gets its `objects`."""
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.join(path, "objects") if path.endswith(".new") else path, mode=0o700)
