"""Checks a store, a state directory or a mount, and mends what costs nothing.

Called by `hpkfs fsck`. A check changes nothing: the journal is copied and the copy is read, so a
daemon may run meanwhile and a damaged journal stays as it is. Mending needs the lock of the state
directory. It does two things only: a clean chunk that is damaged here and whole elsewhere is marked
absent, so that it is fetched again, and a backing file that nothing names moves to `recovery/`.

What a kill leaves behind and the next start clears away is no finding.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import trio

from hpkfs import mountpoint, places
from hpkfs.client import all_mounts
from hpkfs.connection import open_beside
from hpkfs.core.chunks import starts
from hpkfs.core.documents import Reference, parse_head, parse_snapshot
from hpkfs.core.ids import format_timestamp, is_hex32, sha256_hex
from hpkfs.core.limits import MAX_HEAD, MAX_SNAPSHOT
from hpkfs.core.policy import EMPTY_IGNORE, Policy, Rule
from hpkfs.core.uris import FileStore
from hpkfs.durable import TEMPORARY_SUFFIX, RealDisk
from hpkfs.errors import (
    AuthorisationError,
    BusyError,
    HpkfsError,
    IntegrityError,
    JournalError,
    MissingObjectError,
    QuotaError,
    UsageError,
)
from hpkfs.inodes import ABSENT, DIRTY, HYDRATED, ROOT_INO, Inode
from hpkfs.journal import APPLICATION_ID, META_BASE, VERSION, Journal
from hpkfs.objects import ObjectStore
from hpkfs.transport.base import HEAD_NAME, check_put_name
from hpkfs.transport.local import FOLDERS, LOCK_NAME, LocalTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpkfs.core.documents import FileRecord, Head, Piece, Snapshot
    from hpkfs.core.uris import StoreUri
    from hpkfs.journal import Checkpoint
    from hpkfs.transport.base import Transport

EXIT_FINDINGS: Final = 6
JOURNAL_PROBLEMS_MAX: Final = 20
FOLDER_DEPTH_MAX: Final = 4_096
JOURNAL_NAME: Final = "journal.sqlite3"
OUR_NAMES: Final = (JOURNAL_NAME, "backing", "objects", "pending", "recovery", places.STORE_NOTE)
_TEMPORARY = re.compile(r".*\.[0-9a-f]{8}" + re.escape(TEMPORARY_SUFFIX))
_POLICY: Final = Policy(EMPTY_IGNORE)


def check(
    target: str, *, state_dir: str | None = None, read_data: bool = False, repair: bool = False
) -> list[dict[str, object]]:
    """Check what a person names.

    Args:
        target: a mountpoint or a path in a mount (its store and its state directory are checked),
            a state directory (with its store if it is mounted), or the address of a store.
        state_dir: a state directory to check besides.
        read_data: read every object and every clean chunk, and compare the digests.
        repair: mend what can be mended.

    Returns:
        Findings: `what`, `where`, `repairable`, with `repair` also `repaired`; `notice` is true
        where something is worth knowing and not damage. `exit_code` says how the command ends.

    Raises:
        UsageError: the target is none of these.
        BusyError: `repair` while a daemon, or another command, has the state directory.
        TransientError, AuthorisationError: the store does not let itself be read.
    """
    place = _find(target, state_dir)
    found = _Report()
    if place.state_dir is None:
        trio.run(_check_store, place, found, read_data)
        return found.to_json(repair=repair)
    lock = places.RunLock(place.state_dir)
    is_live = not _acquire(lock, needed=repair)
    try:
        if place.store is not None:
            trio.run(_check_store, place, found, read_data)
        state = _StateFolder(place.state_dir, is_live=is_live)
        found.extend(_check_state(state, read_data))
        if repair:
            _mend(state, found)
    finally:
        lock.release()
    return found.to_json(repair=repair)


def exit_code(findings: list[dict[str, object]]) -> int:
    """Return 6 when something is wrong, 0 when there are only notices, or nothing."""
    return EXIT_FINDINGS if any(not one.get("notice") for one in findings) else 0


# -- what is meant -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """What is to be checked; `at` is a checkpoint that the address names."""

    store: StoreUri | None
    state_dir: str | None
    at: str | None = None


def _find(target: str, state_dir: str | None) -> _Place:
    named = None if state_dir is None else os.path.realpath(state_dir)
    if named is not None and not _is_state_dir(named):
        raise UsageError(
            f"{named} is not a state directory of hpkfs.",
            next_step="`hpkfs list` shows the state directories.",
        )
    if places.has_scheme(target):
        return _store_place(target, named)
    path = mountpoint.resolve(target)
    around = mountpoint.mount_around(path)
    if around is not None:
        return _mounted_place(around, named)
    if _is_state_dir(path):
        record = next((r for r in all_mounts() if os.path.realpath(r.state_dir) == path), None)
        store = None if record is None else places.resolve_uri(record.uri)[0]
        return _Place(store, path)
    return _store_place(target, named)


def _store_place(target: str, state_dir: str | None) -> _Place:
    store, at = places.resolve_uri(target)
    if isinstance(store, FileStore):
        try:
            names = os.listdir(store.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                f"There is nothing to check: {store.path} is not a directory.",
                next_step="Name a store, a mountpoint or a state directory. Is its disk mounted?",
            ) from error
        except OSError as error:
            raise AuthorisationError(
                f"{store.path} cannot be read: {error.strerror}.",
                kept="Nothing was changed.",
                next_step="Run the check as the user who owns it.",
            ) from error
        if not {HEAD_NAME, *FOLDERS}.intersection(names):
            raise UsageError(
                f"{store.path} is neither a store nor a state directory, and nothing is mounted"
                " on it.",
                next_step="`hpkfs list` shows mounts, stores and state directories.",
            )
    return _Place(store, state_dir, at)


def _mounted_place(mount: mountpoint.Mount, state_dir: str | None) -> _Place:
    """A mount's parts by its record; of a dead mount by what the kernel says is its source."""
    record = next((r for r in all_mounts() if r.mountpoint == mount.path), None)
    if record is not None:
        return _Place(places.resolve_uri(record.uri)[0], os.path.realpath(record.state_dir))
    store, _ = places.resolve_uri(mount.source)
    state_dir = state_dir or places.state_dir(store)
    return _Place(store, state_dir if _is_state_dir(state_dir) else None)


def _is_state_dir(path: str) -> bool:
    folder = os.path.join(path, places.OUR_FOLDER)
    return any(os.path.lexists(os.path.join(folder, name)) for name in OUR_NAMES)


def _acquire(lock: places.RunLock, *, needed: bool) -> bool:
    """Take the lock if it is free; whether nobody else changes the state meanwhile.

    Raises:
        BusyError: the lock is needed, and someone has it.
    """
    try:
        lock.acquire()
    except BusyError as error:
        if needed:
            raise BusyError(
                error.happened,
                kept="Nothing was changed; --repair needs the state directory for itself.",
                next_step="Unmount the agent, then repeat it; without --repair it is only checked.",
            ) from error
        return False
    except OSError as error:
        if needed:
            raise UsageError(
                f"{lock.path} cannot be written: {error.strerror}.", kept="Nothing was changed."
            ) from error
    return True


# -- findings ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refetch:
    """Mark chunks of one file absent. `path`: its backing file, if that goes to `recovery/`."""

    ino: int
    record_text: str | None
    indexes: tuple[int, ...]
    path: str | None = None


@dataclass(frozen=True, slots=True)
class _MoveAside:
    """Move a backing file that nothing names to `recovery/`."""

    path: str


@dataclass(slots=True)
class _Finding:
    what: str
    where: str
    mend: _Refetch | _MoveAside | None = None
    notice: bool = False
    repaired: bool = False

    def to_json(self, *, repair: bool) -> dict[str, object]:
        told: dict[str, object] = {
            "what": self.what,
            "where": self.where,
            "repairable": self.mend is not None,
        }
        if repair:
            told["repaired"] = self.repaired
        if self.notice:
            told["notice"] = True
        return told


@dataclass(slots=True)
class _Report:
    """The findings, in the order in which they were made."""

    found: list[_Finding] = field(default_factory=list)

    def add(self, what: str, where: str, mend: _Refetch | _MoveAside | None = None) -> None:
        self.found.append(_Finding(what.rstrip("."), where, mend))

    def tell(self, what: str, where: str) -> None:
        """Add what is no damage."""
        self.found.append(_Finding(f"No damage: {what}", where, notice=True))

    def extend(self, other: _Report) -> None:
        self.found += other.found

    def to_json(self, *, repair: bool) -> list[dict[str, object]]:
        return [one.to_json(repair=repair) for one in self.found]


# -- a store -------------------------------------------------------------------------------


async def _check_store(place: _Place, found: _Report, read_data: bool) -> None:
    assert place.store is not None, "asked for"
    uri = str(place.store)
    mounted = next((r.state_dir for r in all_mounts() if r.uri == uri and not r.read_only), None)
    state_dir = place.state_dir or mounted or places.state_dir(place.store)
    transport = open_beside(place.store, state_dir=state_dir)
    try:
        await _StoreCheck(transport, str(place.store), found, read_data=read_data).run(place.at)
    finally:
        await transport.aclose()


class _StoreCheck:
    """Head, chain and objects of one store."""

    def __init__(self, transport: Transport, uri: str, found: _Report, *, read_data: bool) -> None:
        self._transport = transport
        self._local = transport if isinstance(transport, LocalTransport) else None
        self._uri = uri
        self._found = found
        self._read_data = read_data
        self._snapshots: dict[str, Snapshot] = {}
        self._done: set[Piece] = set()

    async def run(self, at: str | None) -> None:
        if self._local is not None:
            await trio.to_thread.run_sync(self._check_names, self._local)
        head = await self._head()
        whole = head is not None and await self._chain(head)
        if at is not None and at not in self._snapshots:
            await self._snapshot(at, "the address", None, head)
        if not whole:  # what lies behind the break can still be checked
            for snapshot_id in await self._transport.list_snapshots():
                if snapshot_id not in self._snapshots and is_hex32(snapshot_id):
                    await self._snapshot(snapshot_id, "the store", None, head)
        newest = None if head is None else self._snapshots.get(head.snapshot_id)
        if self._read_data and newest is not None:
            await self._check_files(newest)
        await self._check_objects()

    async def _check_objects(self) -> None:
        for snapshot in self._snapshots.values():
            for path, record in snapshot.files.items():
                for piece in record.pieces:
                    if piece not in self._done:
                        await self._read(piece, _needed_by(path, snapshot))

    def _check_names(self, local: LocalTransport) -> None:
        """Name what no program of ours put there. Blocking."""
        copies = local.conflict_copies()
        for name in copies:
            self._found.tell(
                "a sync program made a copy of the head; two machines wrote at one time", name
            )
        known = {HEAD_NAME, LOCK_NAME, *FOLDERS, *copies}
        for name in _listing(local.root):
            if name not in known and not _is_passing(name):
                self._found.tell("an unknown file in the store", name)
        for folder in FOLDERS:
            for name in _listing(os.path.join(local.root, folder)):
                try:
                    check_put_name(f"{folder}/{name}")
                except UsageError:
                    if not _is_passing(name):
                        self._found.tell("an unknown file in the store", f"{folder}/{name}")

    async def _head(self) -> Head | None:
        try:
            return parse_head(await self._transport.get(HEAD_NAME, limit=MAX_HEAD))
        except MissingObjectError:
            self._found.add("The head is missing", f"{HEAD_NAME} in {self._uri}")
        except IntegrityError as error:
            self._found.add(error.happened, f"{HEAD_NAME} in {self._uri}")
        return None

    async def _chain(self, head: Head) -> bool:
        """Follow the parents from the head; whether the first checkpoint was reached."""
        reference: Reference | None = Reference(head.snapshot_id, head.sha256)
        named_by = "the head"
        while reference is not None:
            if reference.snapshot_id in self._snapshots:
                self._found.add("The chain of parents runs in a circle", named_by)
                return False
            snapshot = await self._snapshot(reference.snapshot_id, named_by, reference, head)
            if snapshot is None:
                return False
            named_by = f"the checkpoint {snapshot.snapshot_id}"
            reference = snapshot.parent
        return True

    async def _snapshot(
        self, snapshot_id: str, named_by: str, reference: Reference | None, head: Head | None
    ) -> Snapshot | None:
        name = f"snapshots/{snapshot_id}.json"
        where = f"{name}, named by {named_by}"
        try:
            data = await self._transport.get(name, limit=MAX_SNAPSHOT)
            snapshot = await trio.to_thread.run_sync(_parse, data, reference, head)
            if snapshot.snapshot_id != snapshot_id:
                self._found.add(f"It is the checkpoint {snapshot.snapshot_id}", where)
                return None
        except MissingObjectError:
            self._found.add("A checkpoint is missing", where)
        except (IntegrityError, AuthorisationError) as error:
            self._found.add(error.happened, where)
        else:
            self._snapshots[snapshot_id] = snapshot
            return snapshot
        return None

    async def _check_files(self, snapshot: Snapshot) -> None:
        """Compare the digests of whole files: of one checkpoint, since each file is read."""
        for path, record in snapshot.files.items():
            digest = hashlib.sha256()
            for piece in record.pieces:
                data = await self._read(piece, _needed_by(path, snapshot))
                if data is None:
                    break
                await trio.to_thread.run_sync(digest.update, data)
            else:
                if digest.hexdigest() != record.sha256:
                    self._found.add(
                        "The pieces are whole, and the file is not what its digest says",
                        _needed_by(path, snapshot),
                    )

    async def _read(self, piece: Piece, needed_by: str) -> bytes | None:
        """Check one object; its bytes if they were read and are right."""
        is_new = piece not in self._done
        self._done.add(piece)
        data = None
        try:
            if self._read_data:
                data = await self._transport.get(piece.object, limit=piece.size)
                problem = await trio.to_thread.run_sync(_problem, piece, data)
            else:
                problem = await self._look(piece)
        except MissingObjectError:
            problem = "An object is missing"
        except (IntegrityError, AuthorisationError) as error:
            problem = error.happened
        if problem is None:
            return data
        if is_new:
            self._found.add(problem, f"{piece.object}, needed by {needed_by}")
        return None

    async def _look(self, piece: Piece) -> str | None:
        """Check that an object is there; in a directory also its size."""
        if not await self._transport.exists(piece.object):
            return "An object is missing"
        if self._local is None:
            return None
        path = os.path.join(self._local.root, piece.object)
        size = await self._local.ask(_size, path)
        return None if size == piece.size else _wrong_size(size or 0, piece.size)


def _parse(data: bytes, reference: Reference | None, head: Head | None) -> Snapshot:
    if head is None:
        return parse_snapshot(data, reference=reference)
    return parse_snapshot(data, owner_id=head.owner_id, kind=head.kind, reference=reference)


def _needed_by(path: str, snapshot: Snapshot) -> str:
    return f"{path} of checkpoint {snapshot.snapshot_id}"


def _problem(piece: Piece, data: bytes) -> str | None:
    if len(data) != piece.size:
        return _wrong_size(len(data), piece.size)
    return None if sha256_hex(data) == piece.sha256 else "The bytes are not what the digest says"


def _wrong_size(size: int, expected: int) -> str:
    return f"It has {size:,} bytes instead of {expected:,}"


def _is_passing(name: str) -> bool:
    """Whether a name is what a writer that was killed leaves, or a sync program's own."""
    return name.startswith(".") or _TEMPORARY.fullmatch(name) is not None


def _listing(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- a state directory ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StateFolder:
    """One state directory; `is_live` when someone else may change it meanwhile."""

    path: str
    is_live: bool

    @property
    def folder(self) -> str:
        return os.path.join(self.path, places.OUR_FOLDER)

    def inside(self, *names: str) -> str:
        return os.path.join(self.folder, *names)


def _check_state(state: _StateFolder, read_data: bool) -> _Report:
    """Check; while a daemon runs twice, since only what stays is a finding."""
    found = _check_copy(state, read_data)
    if state.is_live and found.found:
        first = {(one.what, one.where) for one in found.found}
        again = _check_copy(state, read_data)
        return _Report([one for one in again.found if (one.what, one.where) in first])
    return found


def _check_copy(state: _StateFolder, read_data: bool) -> _Report:
    """Check by a private copy of the journal."""
    found = _Report()
    path = state.inside(JOURNAL_NAME)
    held = [*_listing(state.inside("backing")), *_listing(state.inside("pending"))]
    try:
        is_empty = os.path.getsize(path) == 0 and not _size(path + "-wal")
    except FileNotFoundError:
        if held:
            found.add(f"The journal is missing, and {len(held)} files need it", path)
        return found
    if is_empty:
        if held:
            found.add(f"The journal is empty, and {len(held)} files need it", path)
        return found
    with tempfile.TemporaryDirectory(prefix="hpkfs-fsck-") as scratch:
        copy = os.path.join(scratch, JOURNAL_NAME)
        try:
            _copy_journal(path, copy, is_live=state.is_live)
            if problems := _journal_problems(copy):
                for problem in problems:
                    found.add(problem, path)
                return found
            with contextlib.closing(Journal(copy, disk=RealDisk())) as journal:
                trio.run(_StateCheck(state, journal, copy, found, read_data=read_data).run)
        except JournalError as error:
            found.add(error.happened.replace(copy, path), path)
        except sqlite3.Error as error:
            found.add(f"The journal cannot be read: {error}", path)
    return found


def _journal_problems(path: str) -> list[str]:
    """Say what SQLite finds wrong with a journal, or that it is none of ours."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        checked = [str(row[0]) for row in db.execute("PRAGMA integrity_check")]
        application = int(db.execute("PRAGMA application_id").fetchone()[0])
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if checked != ["ok"]:
        return [f"The journal is damaged: {text}" for text in checked[:JOURNAL_PROBLEMS_MAX]]
    if application != APPLICATION_ID:
        return ["It is a database, and not a journal of hpkfs"]
    if version > VERSION:
        return [f"The journal has version {version}, and this program knows {VERSION}"]
    return []


def _copy_journal(path: str, copy: str, *, is_live: bool) -> None:
    """Copy the journal as of one instant; the original is opened for reading only.

    Raises:
        QuotaError: there is no room for the copy.
    """
    try:
        if is_live:
            address = f"file:{quote(path)}?mode=ro"
            with (
                contextlib.closing(sqlite3.connect(address, uri=True)) as source,
                contextlib.closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
        else:
            shutil.copyfile(path, copy)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path + "-wal", copy + "-wal")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QuotaError(
                f"There is no room for a copy of the journal in {os.path.dirname(copy)}.",
                kept="Nothing was changed.",
                next_step="Free space there, or name another folder in TMPDIR.",
            ) from error
        raise JournalError(f"The journal {path} cannot be read: {error.strerror}.") from error


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


class _StateCheck:
    """Journal, backing files and pending checkpoints of one state directory."""

    def __init__(
        self, state: _StateFolder, journal: Journal, copy: str, found: _Report, *, read_data: bool
    ) -> None:
        self._state = state
        self._journal = journal
        self._copy = copy
        self._found = found
        self._read_data = read_data
        self._transport: Transport | None = None
        self._objects: ObjectStore | None = None

    async def run(self) -> None:
        problems = self._journal.check()
        for problem in problems[:JOURNAL_PROBLEMS_MAX]:
            self._found.add(problem, self._state.inside(JOURNAL_NAME))
        self._connect()
        try:
            self._check_base()
            inos = set()
            with contextlib.closing(sqlite3.connect(self._copy)) as db:
                for row in db.execute(f"SELECT {Inode.COLUMNS} FROM inodes"):
                    inode = Inode(row)
                    inos.add(inode.ino)
                    if inode.is_file and inode.nlink:
                        await self._check_file(inode)
            self._check_leftovers(inos)
            await self._check_pending()
        finally:
            if self._transport is not None:
                await self._transport.aclose()

    def _connect(self) -> None:
        """Find the store, from which damaged chunks may come again."""
        uri = self._journal.get_meta("uri") or places.noted_store(self._state.path)
        if uri is None:
            return
        try:
            store = places.resolve_uri(uri)[0]
            self._transport = open_beside(store, state_dir=self._state.path)
        except HpkfsError as error:
            self._found.tell(f"the store was not asked: {error.happened}", uri)
            return
        self._objects = ObjectStore(
            self._transport,
            cache_dir=self._state.inside("objects"),
            pending_dir=self._state.inside("pending"),
            cache_bytes=0,
        )

    def _check_base(self) -> None:
        base = self._journal.get_meta(META_BASE)
        if base is None:
            return
        row = next((r for r in self._journal.checkpoints() if r.snapshot_id == base), None)
        where = f"the base checkpoint {base} in {self._state.inside(JOURNAL_NAME)}"
        if row is None:
            self._found.add("The journal does not know its base", where)
        else:
            self._check_document(row, self._journal.document(base), where)

    def _check_document(self, row: Checkpoint, data: bytes | None, where: str) -> Snapshot | None:
        if data is None:
            self._found.add("The document of a checkpoint is missing", where)
            return None
        if sha256_hex(data) != row.sha256:
            self._found.add("The document of a checkpoint is not what its digest says", where)
            return None
        try:
            return parse_snapshot(data)
        except IntegrityError as error:
            self._found.add(error.happened, where)
            return None

    # -- backing files --------------------------------------------------------------------

    async def _check_file(self, inode: Inode) -> None:
        path = self._state.inside("backing", str(inode.ino))
        where = self._where(inode)
        size = _size(path)
        if inode.record_text is None:
            if size is None:
                self._found.add("The only copy of a file is missing", where)
            return
        try:
            record = inode.record
        except (IntegrityError, ValueError):
            record = None
        if record is None or len(record.pieces) != len(inode.states):
            self._found.add("The journal's record of a file is damaged", where)
        elif size is None:
            self._check_absence(inode, where)
        elif DIRTY not in inode.states and not inode.dirty and size != inode.size:
            await self._check_length(inode, record, path, where)
        else:
            await self._check_chunks(inode, record, path, size, where)

    def _check_absence(self, inode: Inode, where: str) -> None:
        if inode.dirty:
            self._found.add("The bytes changed since the last checkpoint are missing", where)
        elif clean := tuple(i for i, s in enumerate(inode.states) if s != ABSENT):
            mend = _Refetch(inode.ino, inode.record_text, clean)
            self._found.add("The backing file is missing", where, mend)

    async def _check_length(self, inode: Inode, record: FileRecord, path: str, where: str) -> None:
        present = tuple(i for i, state in enumerate(inode.states) if state != ABSENT)
        mend = None
        if await self._can_be_had([record.pieces[i] for i in present]):
            mend = _Refetch(inode.ino, inode.record_text, present, path)
        size = _size(path)
        self._found.add(_wrong_size(size or 0, inode.size), where, mend)

    async def _check_chunks(
        self, inode: Inode, record: FileRecord, path: str, size: int, where: str
    ) -> None:
        offsets = starts(record)
        bad = []
        for index, piece in enumerate(record.pieces):
            if inode.states[index] == HYDRATED:
                is_short = offsets[index] + piece.size > size
                if is_short or (
                    self._read_data and not await _is_whole(path, offsets[index], piece)
                ):
                    bad.append(index)
        for index in bad:
            mend = None
            if await self._can_be_had([record.pieces[index]]):
                mend = _Refetch(inode.ino, inode.record_text, (index,))
            self._found.add(f"Clean chunk {index} is not what its digest says", where, mend)

    async def _can_be_had(self, pieces: list[Piece]) -> bool:
        """Whether whole copies are elsewhere; each is read."""
        if self._objects is None:
            return False
        try:
            for piece in pieces:
                await self._objects.get(piece, keep=False)
        except HpkfsError:
            return False
        return True

    def _check_leftovers(self, inos: set[int]) -> None:
        """Name backing files without an inode; an empty one is left by a kill and holds nothing."""
        dropped = set(self._journal.dropped())
        for ino in sorted(dropped & inos):
            self._found.add(
                "A file is in use, and its bytes are marked for removal", f"inode {ino}"
            )
        known = {str(ino) for ino in inos | dropped}
        for name in _listing(self._state.inside("backing")):
            path = self._state.inside("backing", name)
            if name not in known and _size(path):
                self._found.add("No inode names this backing file", path, _MoveAside(path))

    def _where(self, inode: Inode) -> str:
        """The backing file, and what it is shown as. The name of a secret is in no report."""
        where = f"backing/{inode.ino}"
        shown = self._shown(inode)
        if shown is None or _POLICY.decide(shown, is_folder=False).rule is Rule.SECRET:
            return where
        return f"{where} ({os.fsencode(shown).decode('utf-8', 'backslashreplace')})"

    def _shown(self, inode: Inode) -> str | None:
        parts: list[bytes] = []
        current: Inode | None = inode
        while current is not None and current.ino != ROOT_INO and len(parts) < FOLDER_DEPTH_MAX:
            place = (current.parent, current.name)
            if place[0] is None or place[1] is None:
                place = self._journal.find_name(current.ino) or (None, None)
            if place[0] is None or place[1] is None:
                return None
            parts.append(place[1])
            current = self._journal.load(place[0])
        return None if current is None else os.fsdecode(b"/".join(reversed(parts)))

    # -- pending checkpoints --------------------------------------------------------------

    async def _check_pending(self) -> None:
        """Each is whole, and every object is in it, in another one, or on the store."""
        copies: dict[str, list[str]] = {}
        for folder in map(self._pending_objects, _listing(self._state.inside("pending"))):
            for name in _listing(folder):
                copies.setdefault(f"objects/{name}", []).append(os.path.join(folder, name))
        needed: dict[Piece, str] = {}
        for row in self._journal.checkpoints(state="pending"):
            for path, record in self._pending_files(row).items():
                for piece in record.pieces:
                    needed.setdefault(piece, f"{path} of checkpoint {row.snapshot_id}")
        for piece, needed_by in needed.items():
            for copy in copies.get(piece.object, ()):
                problem = await trio.to_thread.run_sync(_file_problem, copy, piece, self._read_data)
                if problem is not None:
                    self._found.add(problem, f"{copy}, needed by {needed_by}")
        gone = {piece: by for piece, by in needed.items() if piece.object not in copies}
        await self._check_on_store(gone)

    def _pending_objects(self, snapshot_id: str) -> str:
        return self._state.inside("pending", snapshot_id, "objects")

    def _pending_files(self, row: Checkpoint) -> Mapping[str, FileRecord]:
        """Compare both copies of a document; the files of one that is whole."""
        path = self._state.inside("pending", row.snapshot_id, "snapshot.json")
        where = f"the pending checkpoint {row.snapshot_id} in {self._state.inside(JOURNAL_NAME)}"
        in_folder = self._check_document(row, _read_file(path), path)
        in_journal = self._check_document(row, self._journal.document(row.snapshot_id), where)
        snapshot = in_folder or in_journal
        return {} if snapshot is None else snapshot.files

    async def _check_on_store(self, gone: Mapping[Piece, str]) -> None:
        """What a pending checkpoint names and does not hold was published before it."""
        for piece, needed_by in gone.items():
            where = f"{piece.object}, needed by {needed_by}"
            try:
                if self._transport is None:
                    self._found.add("A sealed object is not here, and no store is known", where)
                elif not await self._transport.exists(piece.object):
                    self._found.add("A sealed object is neither here nor on the store", where)
            except IntegrityError as error:
                self._found.add(error.happened, where)
            except HpkfsError as error:
                self._found.tell(f"the store was not asked: {error.happened}", where)
                return


async def _is_whole(path: str, offset: int, piece: Piece) -> bool:
    def read() -> bool:
        with open(path, "rb") as source:
            return sha256_hex(os.pread(source.fileno(), piece.size, offset)) == piece.sha256

    try:
        return await trio.to_thread.run_sync(read)
    except OSError:
        return False


def _file_problem(path: str, piece: Piece, read_data: bool) -> str | None:
    size = _size(path)
    if size != piece.size:
        return _wrong_size(size or 0, piece.size)
    return _problem(piece, _read_file(path) or b"") if read_data else None


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb") as source:
            return source.read()
    except OSError:
        return None


# -- mending -------------------------------------------------------------------------------


def _mend(state: _StateFolder, found: _Report) -> None:
    """Mend what can be mended; the lock is held."""
    todo = [one for one in found.found if one.mend is not None]
    if not todo:
        return
    with contextlib.closing(Journal(state.inside(JOURNAL_NAME), disk=RealDisk())) as journal:
        aside = _Aside(state.inside("recovery"))
        for one in todo:
            match one.mend:
                case _MoveAside(path):
                    one.repaired = aside.take(path)
                case _Refetch() as refetch:
                    one.repaired = _mark_absent(journal, refetch, aside)
                case None:
                    pass


class _Aside:
    """A new folder in `recovery/`, made when the first file comes."""

    def __init__(self, recovery: str) -> None:
        self._recovery = recovery
        self._folder: str | None = None

    def take(self, path: str) -> bool:
        """Move a file here; its bytes stay as they are."""
        try:
            if self._folder is None:
                places.make_private(self._recovery)
                stamp = format_timestamp(int(time.time())).replace(":", "-")
                self._folder = tempfile.mkdtemp(prefix=f"fsck-{stamp}-", dir=self._recovery)
            os.rename(path, os.path.join(self._folder, os.path.basename(path)))
        except OSError:
            return False
        return True


def _mark_absent(journal: Journal, refetch: _Refetch, aside: _Aside) -> bool:
    inode = journal.load(refetch.ino)
    if inode is None or inode.record_text != refetch.record_text:
        return False
    for index in refetch.indexes:
        inode.states[index] = ABSENT
    journal.update(inode.ino, states=bytes(inode.states))
    # The bytes move only when it is certain that nobody takes their place for content.
    journal.sync()
    return refetch.path is None or aside.take(refetch.path)
