"""Inodes in memory: what the kernel asks about, in front of the journal.

The table keeps the hot part of the journal's inodes (least recently used first out) and never
two objects for one inode number, so a caller that holds an `Inode` across an `await` sees every
later change. Called by `volume.py` and `content.py`; all of it is synchronous.
"""

from __future__ import annotations

import json
import stat
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from hpkfs.core.documents import FileRecord, record_from_json, record_to_json

if TYPE_CHECKING:
    from collections.abc import Callable

HOT_INODES_MAX = 8_192
ROOT_INO = 1

# States of one chunk of a file that has a record. The values are stored in the journal.
ABSENT = 0
HYDRATED = 1
DIRTY = 2
UNVERIFIED = 3  # hydrated before a power cut; its digest is checked when it is next read


class Inode:
    """One file, folder, link or node.

    `record` ties the bytes to an object list: chunk `i` of the backing file is piece `i` of the
    record, in the state `states[i]`. Without a record the backing file alone holds the bytes.
    `dirty` means changed since the last seal. Where a regular file is dirty or has no record,
    its backing file is the authority for size and mtime, else the journal is.

    `parent` and `name` are one place where the inode is found; `name` is None when it is unknown
    (a hard link lost its first name) or when there is none.
    """

    __slots__ = (
        "__weakref__",
        "_record",
        "absent",
        "atime_ns",
        "base_mode",
        "base_mtime_ns",
        "ctime_ns",
        "dirty",
        "generation",
        "gid",
        "ino",
        "mode",
        "mtime_ns",
        "name",
        "nlink",
        "parent",
        "rdev",
        "record_text",
        "size",
        "stale",
        "states",
        "target",
        "uid",
        "written_ns",
        "zone",
        "zone_epoch",
    )

    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None
    record_text: str | None
    dirty: int
    parent: int | None
    name: bytes | None
    base_mtime_ns: int | None
    base_mode: int | None

    # The order of the journal's columns.
    COLUMNS = (
        "ino, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, target, "
        "record, states, dirty, parent, name, base_mtime_ns, base_mode"
    )

    def __init__(self, row: tuple[Any, ...]) -> None:
        (
            self.ino,
            self.mode,
            self.uid,
            self.gid,
            self.rdev,
            self.nlink,
            self.size,
            self.atime_ns,
            self.mtime_ns,
            self.ctime_ns,
            self.target,
            self.record_text,
            states,
            self.dirty,
            self.parent,
            self.name,
            self.base_mtime_ns,
            self.base_mode,
        ) = row
        self.states: bytearray = bytearray(states or b"")
        self.absent = 0
        self.count_absent()
        self._record: FileRecord | None = None
        # Bumped by every change of content or attributes; a seal compares it.
        self.generation = 0
        # Size and mtime must be read from the backing file again.
        self.stale = stat.S_ISREG(self.mode) and (bool(self.dirty) or self.record_text is None)
        # When it was last written by the volume's clock, until the backing file has that time.
        self.written_ns = 0
        self.zone: object = None
        self.zone_epoch = -1

    @property
    def record(self) -> FileRecord | None:
        """The object list that the clean chunks belong to, or None."""
        if self._record is None and self.record_text is not None:
            self._record = record_from_json(json.loads(self.record_text), path=f"inode {self.ino}")
        return self._record

    def set_record(self, record: FileRecord | None, states: bytearray) -> None:
        """Tie the bytes to `record` (None: to nothing), one state a piece."""
        self._record = record
        self.record_text = None if record is None else dump_record(record)
        self.states = states
        self.count_absent()

    def count_absent(self) -> None:
        """Recount the chunks that a read must fetch or verify first."""
        self.absent = self.states.count(ABSENT) + self.states.count(UNVERIFIED)

    @property
    def is_file(self) -> bool:
        """Whether this is a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder."""
        return stat.S_ISDIR(self.mode)

    def row(self) -> tuple[Any, ...]:
        """The values of `COLUMNS`."""
        return (
            self.ino,
            self.mode,
            self.uid,
            self.gid,
            self.rdev,
            self.nlink,
            self.size,
            self.atime_ns,
            self.mtime_ns,
            self.ctime_ns,
            self.target,
            self.record_text,
            bytes(self.states) if self.record_text is not None else None,
            self.dirty,
            self.parent,
            self.name,
            self.base_mtime_ns,
            self.base_mode,
        )


def dump_record(record: FileRecord) -> str:
    """Encode a record as the journal stores it."""
    return json.dumps(record_to_json(record), separators=(",", ":"))


class InodeTable:
    """The hot inodes. `load` reads one from the journal; None means there is no such inode."""

    def __init__(self, load: Callable[[int], Inode | None]) -> None:
        self._load = load
        self._alive: weakref.WeakValueDictionary[int, Inode] = weakref.WeakValueDictionary()
        self._hot: OrderedDict[int, Inode] = OrderedDict()

    def get(self, ino: int) -> Inode | None:
        """The inode with this number, from memory or the journal."""
        found = self._hot.get(ino)
        if found is not None:
            self._hot.move_to_end(ino)
            return found
        found = self._alive.get(ino)
        if found is None:
            found = self._load(ino)
            if found is None:
                return None
            self._alive[ino] = found
        self._keep_hot(found)
        return found

    def adopt(self, inode: Inode) -> Inode:
        """Take an inode just read or made; an object that is known already wins."""
        known = self._alive.get(inode.ino)
        if known is not None:
            return known
        self._alive[inode.ino] = inode
        self._keep_hot(inode)
        return inode

    def _keep_hot(self, inode: Inode) -> None:
        self._hot[inode.ino] = inode
        if len(self._hot) > HOT_INODES_MAX:
            self._hot.popitem(last=False)

    def known(self, ino: int) -> Inode | None:
        """The inode if it is in memory; the journal is not asked."""
        return self._alive.get(ino)

    def drop(self, ino: int) -> None:
        """Forget an inode that no longer exists."""
        self._hot.pop(ino, None)
        self._alive.pop(ino, None)

    def reload(self) -> None:
        """Read every inode in memory from the journal again, in place."""
        for inode in list(self._alive.values()):
            fresh = self._load(inode.ino)
            if fresh is None:
                self.drop(inode.ino)
                continue
            if fresh.record_text == inode.record_text:
                # Chunks hydrated since the states were last saved stay hydrated.
                fresh.states = inode.states
            for name in Inode.__slots__:
                if name not in ("__weakref__", "generation"):
                    setattr(inode, name, getattr(fresh, name))
            inode.count_absent()
