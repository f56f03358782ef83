"""Copies a directory tree into the volume of a new agent, and compares the two afterwards.

Called by `importer.py` in a worker thread, while nobody else uses the volume. The source is only
read. Names go into the journal in one transaction at the end (`flush`), when every byte is on the
disk; a kill before that leaves an empty volume.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpkfs import conversations
from hpkfs.errors import HpkfsError, IntegrityError, QuotaError, TransientError
from hpkfs.inodes import ROOT_INO, Inode
from hpkfs.virtual import CONTROL_NAME
from hpkfs.volume import NAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpkfs.volume import Volume

COPY_BYTES = 1 << 20
DIFFERENCES_MAX = 1_000
SQLITE_MAGIC = b"SQLite format 3\0"
SIDECARS = ("-wal", "-shm", "-journal")
DATABASE = "state.db"
WORKSPACE = "workspace"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class Copied:
    """What was done with each path of the source."""

    files: int = 0
    folders: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


class Copier:
    """Copies into one volume. Blocking.

    Args:
        volume: the volume; nobody else uses it.
        exclude: folders that are left out wherever they turn up.
        workspaces: absolute folders whose conversations will belong to the agent's workspace.
    """

    def __init__(
        self, volume: Volume, *, exclude: Sequence[str], workspaces: Sequence[str] = ()
    ) -> None:
        self._volume = volume
        self._exclude = {(s.st_dev, s.st_ino) for s in map(os.stat, filter(None, exclude))}
        self._workspaces = workspaces
        self._scratch = os.path.dirname(volume.content.path(ROOT_INO))
        self._inodes: list[Inode] = []
        self._dentries: list[tuple[int, bytes, int]] = []
        self._linked: dict[tuple[int, int], Inode] = {}
        self._nlinks: dict[int, int] = {}
        self._todo: list[tuple[str, int, str]] = []  # folders: source, inode number, shown path
        self.done = Copied()

    def tree(self, source: str, target: str, *, leave_out: tuple[str, ...] = ()) -> None:
        """Copy what is in `source` into the folder `target` of the volume; "" is its root."""
        parent = ROOT_INO
        if target:
            parent = self._folder_inode(ROOT_INO, os.fsencode(target), os.stat(source)).ino
        self._folder(source, parent, target, {*map(os.fsencode, leave_out), CONTROL_NAME})
        while self._todo:  # not by recursion: folders may lie deeper than Python's stack
            self._folder(*self._todo.pop(), set())

    def empty_folder(self, name: str, like: str) -> None:
        """Make a folder of the root, owned as the folder `like` is."""
        found = os.stat(like)
        self._folder_inode(ROOT_INO, os.fsencode(name), found)

    def flush(self) -> None:
        """Make the copied bytes durable, then write all names in one transaction."""
        os.sync()
        journal = self._volume.journal
        by_ino = {inode.ino: inode for inode in self._inodes}
        for ino, count in self._nlinks.items():
            if ino in by_ino:
                by_ino[ino].nlink += count
        with journal.transaction():
            journal.bulk_insert(self._inodes, self._dentries)
            if ROOT_INO in self._nlinks:
                root = self._volume.get(ROOT_INO)
                root.nlink += self._nlinks[ROOT_INO]
                journal.update(ROOT_INO, nlink=root.nlink)

    # -- copying ------------------------------------------------------------------------------

    def _folder(self, source: str, parent: int, shown: str, leave_out: set[bytes]) -> None:
        try:
            names = sorted(os.listdir(os.fsencode(source)))
        except OSError as error:
            self._skip(shown or ".", f"cannot be listed: {error.strerror}")
            return
        databases = {name for name in names if _is_database(source, name, shown)}
        for name in names:
            text = os.fsdecode(name)
            path = os.path.join(source, text)
            place = f"{shown}/{text}" if shown else text
            if name in leave_out:
                if name != CONTROL_NAME:
                    self._skip(place, "is taken from elsewhere")
                continue
            if _database_of(name) in databases:
                continue  # its content comes with the database
            try:
                self._entry(path, parent, name, place, is_database=name in databases)
            except OSError as error:
                if error.errno in DISK_ERRORS:
                    raise _disk_full() from error
                self._skip(place, f"cannot be read: {error.strerror}")
            except TransientError as error:
                if place == DATABASE:
                    raise  # an agent without its conversation is no copy of it
                self._skip(place, error.happened)

    def _entry(self, path: str, parent: int, name: bytes, place: str, *, is_database: bool) -> None:
        found = os.lstat(path)
        if len(name) > NAME_BYTES_MAX:
            self._skip(place, "has too long a name")
        elif (found.st_dev, found.st_ino) in self._exclude:
            self._skip(place, "belongs to hpkfs")
        elif stat.S_ISDIR(found.st_mode):
            inode = self._folder_inode(parent, name, found)
            self.done.folders += 1
            self._todo.append((path, inode.ino, place))
        elif stat.S_ISLNK(found.st_mode):
            target = os.readlink(os.fsencode(path))
            inode = self._make(found, parent, name)
            inode.target, inode.size = target, len(target)
            self._keep(inode)
        elif stat.S_ISREG(found.st_mode):
            self._file(path, parent, name, found, is_database=is_database)
        elif stat.S_ISFIFO(found.st_mode):
            self._keep(self._make(found, parent, name))
        else:
            self._skip(place, "is a socket or device; the program that needs it makes it anew")

    def _folder_inode(self, parent: int, name: bytes, found: os.stat_result) -> Inode:
        inode = self._make(found, parent, name)
        self._keep(inode)
        self._nlinks[parent] = self._nlinks.get(parent, 0) + 1
        return inode

    def _file(
        self, path: str, parent: int, name: bytes, found: os.stat_result, *, is_database: bool
    ) -> None:
        key = (found.st_dev, found.st_ino)
        linked = self._linked.get(key) if found.st_nlink > 1 else None
        if linked is not None:
            self._dentries.append((parent, name, linked.ino))
            linked.nlink += 1
            return
        if is_database and self._database(path, parent, name, found):
            return
        inode = self._store(path, parent, name, found)
        if found.st_nlink > 1:
            self._linked[key] = inode

    def _database(self, path: str, parent: int, name: bytes, found: os.stat_result) -> bool:
        """Take a database over as of one instant; False where SQLite cannot read it."""
        with tempfile.TemporaryDirectory(prefix=".copy-", dir=self._scratch) as scratch:
            try:
                copy = self._backup(path, scratch, is_conversation=_is_conversation(parent, name))
            except IntegrityError:
                self._damaged(path, parent, name)
                return False
            left = [end for end in SIDECARS if os.path.exists(copy + end)]
            self._store(copy, parent, name, found)
            for end in left:
                beside = name + os.fsencode(end)
                self._store(copy + end, parent, beside, os.stat(copy + end))
        return True

    def _backup(self, path: str, scratch: str, *, is_conversation: bool) -> str:
        copy = conversations.backup_database(path, scratch)
        if is_conversation:
            conversations.mark_workspace(copy, self._workspaces)
        return copy

    def _damaged(self, path: str, parent: int, name: bytes) -> None:
        """Take the sidecars of a damaged database over as they are, for whoever repairs it."""
        for end in ("-wal", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                beside = path + end
                self._store(beside, parent, name + os.fsencode(end), os.lstat(beside))

    def _store(self, source: str, parent: int, name: bytes, found: os.stat_result) -> Inode:
        """Copy the bytes of a file, with the attributes of `found`."""
        inode = self._make(found, parent, name)
        backing = self._volume.content.path(inode.ino)
        try:
            with open(source, "rb") as read, open(backing, "wb", opener=_private) as out:
                _copy_data(read.fileno(), out.fileno())
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(backing)
            raise
        os.utime(backing, ns=(found.st_atime_ns, found.st_mtime_ns))
        inode.size = os.stat(backing).st_size
        self._keep(inode)
        self.done.files += 1
        self.done.bytes += inode.size
        return inode

    def _make(self, found: os.stat_result, parent: int, name: bytes) -> Inode:
        is_root = os.getuid() == 0
        return Inode(
            (
                self._volume.journal.new_ino(),
                found.st_mode,
                found.st_uid if is_root else os.getuid(),
                found.st_gid if is_root else os.getgid(),
                0,
                2 if stat.S_ISDIR(found.st_mode) else 1,
                0,
                found.st_atime_ns,
                found.st_mtime_ns,
                found.st_ctime_ns,
                None,
                None,
                None,
                1,
                parent,
                name,
                None,
                None,
            )
        )

    def _keep(self, inode: Inode) -> None:
        assert inode.parent is not None, "made with a name"
        assert inode.name is not None, "made with a name"
        self._inodes.append(inode)
        self._dentries.append((inode.parent, inode.name, inode.ino))

    def _skip(self, path: str, reason: str) -> None:
        self.done.skipped.append((_shown(path), reason))

    # -- comparing ----------------------------------------------------------------------------

    def differences(self, source: str) -> list[str]:
        """Compare a tree with what was copied from it to the root; return paths that differ.

        Every byte is read. What was skipped, and said to be, is not compared.
        """
        found: list[str] = []
        skipped = {path for path, _ in self.done.skipped}
        todo = [(source, ROOT_INO, "")]
        while todo and len(found) < DIFFERENCES_MAX:
            todo += self._compare(*todo.pop(), skipped, found)
        return found

    def _compare(
        self, source: str, parent: int, shown: str, skipped: set[str], found: list[str]
    ) -> list[tuple[str, int, str]]:
        """Compare one folder; return the folders in it, to be compared next."""
        folders = []
        names = sorted(os.listdir(os.fsencode(source)))
        databases = {name for name in names if _is_database(source, name, shown)}
        copied = dict(self._volume.walk_folder(parent))
        for name in names:
            text = os.fsdecode(name)
            path = os.path.join(source, text)
            place = f"{shown}/{text}" if shown else text
            inode = copied.pop(name, None)
            if _shown(place) in skipped or (not shown and name == CONTROL_NAME):
                continue
            if _database_of(name) in databases:
                continue  # compared with the database
            if inode is None or not self._is_equal(path, inode, is_database=name in databases):
                found.append(_shown(place))
            elif inode.is_folder:
                folders.append((path, inode.ino, place))
        found += [
            _shown(f"{shown}/{text}" if shown else text)
            for text in map(os.fsdecode, copied)
            if (shown or text != WORKSPACE) and _database_of(os.fsencode(text)) not in databases
        ]
        return folders

    def _is_equal(self, path: str, inode: Inode, *, is_database: bool) -> bool:
        status = os.lstat(path)
        if status.st_mode != inode.mode:
            return False
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(os.fsencode(path)) == inode.target
        if not stat.S_ISREG(status.st_mode):
            return True
        ours = _digest(self._volume.content.path(inode.ino))
        if not is_database:
            return _digest(path) == ours
        with tempfile.TemporaryDirectory(prefix=".copy-", dir=self._scratch) as scratch:
            try:
                is_conversation = _is_conversation(inode.parent, inode.name)
                copy = self._backup(path, scratch, is_conversation=is_conversation)
            except IntegrityError:
                return _digest(path) == ours
            return _digest(copy) == ours and self._has_equal_sidecars(copy, inode)

    def _has_equal_sidecars(self, copy: str, inode: Inode) -> bool:
        assert inode.parent is not None, "it was just copied"
        assert inode.name is not None, "it was just copied"
        for end in SIDECARS:
            beside = self._volume.journal.lookup(inode.parent, inode.name + os.fsencode(end))
            if (beside is not None) != os.path.exists(copy + end):
                return False
            if beside and _digest(copy + end) != _digest(self._volume.content.path(beside)):
                return False
        return True


def _is_database(folder: str, name: bytes, shown: str) -> bool:
    """Whether a file is an SQLite database with sidecars beside it, or the conversation's."""
    path = os.path.join(folder, os.fsdecode(name))
    is_conversation = not shown and name == os.fsencode(DATABASE)
    if not is_conversation and not any(os.path.lexists(path + end) for end in SIDECARS):
        return False
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as source:
            return source.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False


def _is_conversation(parent: int | None, name: bytes | None) -> bool:
    return parent == ROOT_INO and name == os.fsencode(DATABASE)


def _database_of(name: bytes) -> bytes:
    """The database that a sidecar belongs to by its name; empty for every other name."""
    for end in map(os.fsencode, SIDECARS):
        if name.endswith(end):
            return name.removesuffix(end)
    return b""


def _copy_data(source: int, target: int) -> None:
    """Copy the bytes of a file and leave its holes as holes."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    start = 0
    while start < size:
        try:
            start = os.lseek(source, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        while start < end:
            data = os.pread(source, min(COPY_BYTES, end - start), start)
            if not data:
                return  # it was cut short meanwhile
            view = memoryview(data)
            while view:
                written = os.pwrite(target, view, start)
                start += written
                view = view[written:]


def _digest(path: str) -> str:
    with open(path, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _shown(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _disk_full() -> HpkfsError:
    return QuotaError(
        "The disk of the state directory is full.",
        kept="The source is as it was, and nothing was put on the store.",
        next_step="Free space there, or name a directory on another disk with --state-dir.",
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
