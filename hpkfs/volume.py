"""Every file operation, in the one order that survives a crash.

`Volume` is the file system without a kernel: `fuse.py` translates to it, tests call it directly.
A metadata operation is one journal transaction, committed before it returns. Content goes to the
backing file after the journal knows that the chunk is dirty. Memory changes only after the
journal did, so a failed operation leaves nothing behind.

Errors of the file system are `OSError` with their errno; those of hydration and disk are
`HpkfsError`. Code between two awaits is atomic; no lock is needed beyond `content.py`'s cuts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import trio

from hpkfs.core.paths import MAX_PATH_BYTES
from hpkfs.core.policy import EMPTY_IGNORE, Policy, Rule
from hpkfs.errors import QuotaError
from hpkfs.inodes import DIRTY, ROOT_INO, Inode, InodeTable
from hpkfs.reserve import RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpkfs.content import Content
    from hpkfs.journal import Journal
    from hpkfs.reserve import Reserve

NAME_BYTES_MAX = 255
LINKS_MAX = 65_000
# What the journal (until 2262) and ext4 below it (from 1901) store; as on any disk others are cut.
TIME_NS_MIN, TIME_NS_MAX = -(1 << 31) * 10**9, (1 << 63) - 1
PATH_DEPTH_MAX = 2_048

# The kernel stamps "now" (touch, utimensat UTIME_NOW) from this clock of some ms a tick, and
# the binding does not tell it from a time that was named; so every time here comes from it too,
# or what is touched later could seem older (test_regression_what_changes_later_is_never_older).
CLOCK_REALTIME_COARSE = 5  # clock_gettime(2); Python has no name for it

Removed = TypeVar("Removed")

# Sidecars that hold a part of a database's content until SQLite checkpoints it.
DATABASE_SIDECARS = (b"-wal", b"-journal")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the owner of what is made."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A name whose inode changed: the kernel's caches must drop it. `old_ino` 0: it had none."""

    parent: int
    name: bytes
    old_ino: int


@dataclass(frozen=True, slots=True)
class Change:
    """Attributes to set; None leaves one alone. Times are ns since the epoch."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Volume:
    """The tree of one state directory."""

    def __init__(self, *, journal: Journal, content: Content, reserve: Reserve) -> None:
        self.journal = journal
        self.content = content
        self._reserve = reserve
        self.inodes = InodeTable(journal.load)
        journal.on_rollback = self._reload
        self.policy = Policy(EMPTY_IGNORE)
        # Bumped by whatever may move a path between the zones.
        self.zone_epoch = 0
        # What travels changed since the last seal; the sealer clears it.
        self.changed_since: float | None = None
        self.changed_last = 0.0
        self.change_count = 0
        self.operations = 0
        self._quiet = False
        self._newest_ns = 0
        self._generations = itertools.count(1)
        self._lookups: dict[int, int] = {}
        self._opens: dict[int, int] = {}
        self._dead: set[int] = set()
        # Files that are empty now, and that a crash would empty again.
        self._emptied: set[int] = set()

    # -- finding --------------------------------------------------------------------------

    def get(self, ino: int) -> Inode:
        """An inode by number, with size and times as they are now.

        Raises:
            FileNotFoundError: there is no such inode.
        """
        inode = self.inodes.get(ino)
        if inode is None:
            raise _error(errno.ENOENT)
        if inode.stale:
            self._refresh(inode)
        return inode

    def find(self, parent: int, name: bytes) -> Inode:
        """The inode of a name.

        Raises:
            FileNotFoundError: no such name.
            OSError: ENAMETOOLONG.
        """
        if len(name) > NAME_BYTES_MAX:
            raise _error(errno.ENAMETOOLONG)
        if name == b".":
            return self.get(parent)
        if name == b"..":
            return self.get(self.get(parent).parent or ROOT_INO)
        ino = self.journal.remembered(parent, name)
        inode = None if ino is None else self.inodes.get(ino)
        if inode is None:
            found = self.journal.lookup_inode(parent, name)
            if found is None:
                raise _error(errno.ENOENT)
            inode = self.inodes.adopt(found)
        inode.parent, inode.name = parent, name
        if inode.stale:
            self._refresh(inode)
        return inode

    def lookup(self, parent: int, name: bytes) -> Inode:
        """`find` for the kernel, which now knows the inode until it forgets it."""
        inode = self.find(parent, name)
        self.remember(inode.ino)
        return inode

    def resolve(self, path: str) -> Inode:
        """The inode of a mount-relative path; links are not followed."""
        inode = self.get(ROOT_INO)
        for part in os.fsencode(path).split(b"/"):
            if part:
                inode = self.find(inode.ino, part)
        return inode

    def path_of(self, inode: Inode) -> str:
        """One mount-relative path of an inode; empty for the root or a file without a name."""
        parts: list[bytes] = []
        while inode.ino != ROOT_INO and len(parts) < PATH_DEPTH_MAX:
            if inode.parent is None or inode.name is None:
                place = self.journal.find_name(inode.ino)
                if place is None:
                    return ""
                inode.parent, inode.name = place
            parts.append(inode.name)
            above = self.inodes.get(inode.parent)
            if above is None:
                return ""
            inode = above
        return os.fsdecode(b"/".join(reversed(parts)))

    def list_folder(self, ino: int) -> list[tuple[bytes, int]]:
        """Names and inode numbers in a folder."""
        return self.journal.children(ino)

    def walk_folder(self, ino: int) -> list[tuple[bytes, Inode]]:
        """Names and inodes of a folder, as they are now."""
        found: list[tuple[bytes, Inode]] = []
        for name, fresh in self.journal.folder(ino):
            inode = self.inodes.known(fresh.ino) or fresh
            if inode.stale:
                self._refresh(inode)
            if inode.name is None:
                inode.parent, inode.name = ino, name
            found.append((name, inode))
        return found

    # -- life of an inode -----------------------------------------------------------------

    def remember(self, ino: int) -> None:
        """The kernel was told of an inode."""
        self._lookups[ino] = self._lookups.get(ino, 0) + 1

    def forget(self, ino: int, count: int) -> None:
        """The kernel dropped `count` references."""
        left = self._lookups.get(ino, 0) - count
        if left > 0:
            self._lookups[ino] = left
            return
        self._lookups.pop(ino, None)

    def is_open(self, ino: int) -> bool:
        """Whether some process holds the file open."""
        return ino in self._opens

    def open_inos(self) -> set[int]:
        """Inodes that some process holds open."""
        return set(self._opens)

    def bury(self) -> None:
        """Drop the inodes that nothing names, holds or remembers; one transaction."""
        gone = [i for i in self._dead if i not in self._opens and i not in self._lookups]
        if not gone:
            return
        self._with_reserve(lambda: self._drop(gone))
        for ino in gone:
            self._dead.discard(ino)
            self.inodes.drop(ino)
            self.content.forget(ino)

    def _drop(self, inos: list[int]) -> None:
        with self.journal.transaction():
            for ino in inos:
                self.journal.drop_inode(ino)

    async def open(self, ino: int, flags: int) -> Inode:
        """Open a file; O_TRUNC empties it."""
        inode = self.get(ino)
        self._opens[ino] = self._opens.get(ino, 0) + 1
        if flags & os.O_TRUNC:  # with O_RDONLY too, as Linux does; the kernel checked the rights
            try:
                await self.setattr(ino, Change(size=0))
            except BaseException:
                self.release(ino)
                raise
        return inode

    def release(self, ino: int) -> None:
        """One opener is gone."""
        left = self._opens.get(ino, 0) - 1
        if left > 0:
            self._opens[ino] = left
        else:
            self._opens.pop(ino, None)

    # -- making and removing names --------------------------------------------------------

    def make(
        self,
        parent: int,
        name: bytes,
        *,
        mode: int,
        caller: Caller,
        rdev: int = 0,
        target: bytes | None = None,
    ) -> Inode:
        """Make a file, folder, link, fifo, socket or device node; the kernel remembers it.

        Raises:
            OSError: EEXIST, ENOENT, ENOTDIR, ENAMETOOLONG, EMLINK.
        """
        folder = self._folder(parent)
        _check_name(name)
        if self.journal.lookup(parent, name) is not None:
            raise _error(errno.EEXIST)
        is_folder = stat.S_ISDIR(mode)
        if is_folder and folder.nlink >= LINKS_MAX:
            raise _error(errno.EMLINK)
        gid = caller.gid
        if folder.mode & stat.S_ISGID:
            gid = folder.gid
            if is_folder:
                mode |= stat.S_ISGID
        now = self._now()
        size = len(target) if target is not None else 0
        inode = Inode(
            (
                self.journal.new_ino(), mode, caller.uid, gid, rdev, 2 if is_folder else 1, size,
                now, now, now, target, None, None, 1, parent, name, None, None,
            )
        )  # fmt: skip
        inode.stale = False
        if inode.is_file:
            self.content.create(inode.ino, now)
        with self.journal.transaction():
            self.journal.insert(inode)
            self.journal.set_dentry(parent, name, inode.ino)
            self._touch_folder(folder, now, links=1 if is_folder else 0)
            self._note(inode, "create")
        self.inodes.adopt(inode)
        self.remember(inode.ino)
        return inode

    async def create(self, parent: int, name: bytes, *, mode: int, caller: Caller) -> Inode:
        """Make a regular file and open it."""
        inode = self.make(parent, name, mode=stat.S_IFREG | (mode & 0o7777), caller=caller)
        self._opens[inode.ino] = 1
        return inode

    def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """Give a file one more name."""
        inode = self.get(ino)
        folder = self._folder(parent)
        _check_name(name)
        if inode.is_folder:
            raise _error(errno.EPERM)
        if inode.nlink == 0:
            raise _error(errno.ENOENT)
        if inode.nlink >= LINKS_MAX:
            raise _error(errno.EMLINK)
        if self.journal.lookup(parent, name) is not None:
            raise _error(errno.EEXIST)
        now = self._now()
        with self.journal.transaction():
            self.journal.set_dentry(parent, name, ino)
            self.journal.update(ino, nlink=inode.nlink + 1, ctime_ns=now)
            self._touch_folder(folder, now)
            self._note_name(folder, name, inode, "link")
        inode.nlink += 1
        inode.ctime_ns = now
        self.remember(ino)
        return inode

    def unlink(self, parent: int, name: bytes) -> Inode:
        """Remove a name that is no folder; an open file lives until it is closed."""
        return self._with_reserve(lambda: self._unlink(parent, name))

    def _unlink(self, parent: int, name: bytes) -> Inode:
        inode = self.find(parent, name)
        if inode.is_folder:
            raise _error(errno.EISDIR)
        folder = self._folder(parent)
        now = self._now()
        with self.journal.transaction():
            self._note_name(folder, name, inode, "unlink")
            self.journal.delete_dentry(parent, name)
            self._touch_folder(folder, now)
            self._lose_name(inode, parent, name, now)
        return inode

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty folder."""
        self._with_reserve(lambda: self._rmdir(parent, name))

    def _with_reserve(self, remove: Callable[[], Removed]) -> Removed:
        """Remove something; on a full disk with the space put by, else nothing could be removed."""
        try:
            return remove()
        except QuotaError:
            self._reserve.give()
            return remove()

    def _rmdir(self, parent: int, name: bytes) -> None:
        inode = self.find(parent, name)
        if not inode.is_folder:
            raise _error(errno.ENOTDIR)
        if name == b".":
            raise _error(errno.EINVAL)
        if self.journal.has_children(inode.ino):
            raise _error(errno.ENOTEMPTY)
        folder = self._folder(parent)
        now = self._now()
        with self.journal.transaction():
            self._note(inode, "rmdir")
            self.journal.delete_dentry(parent, name)
            self._touch_folder(folder, now, links=-1)
            self._lose_name(inode, parent, name, now)

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        *,
        no_replace: bool = False,
        exchange: bool = False,
    ) -> None:
        """Move a name, replacing what the new one named; both or neither after a crash."""
        _check_name(new_name)
        inode = self.find(parent, name)
        source, target = self._folder(parent), self._folder(new_parent)
        known = self.journal.lookup(new_parent, new_name)
        if exchange:
            if known is None:
                raise _error(errno.ENOENT)
            self._exchange(inode, source, target, new_name)
            return
        if known is not None and no_replace:
            raise _error(errno.EEXIST)
        if known == inode.ino:
            return  # rename(2): two names of one file, nothing happens
        victim = self.find(new_parent, new_name) if known is not None else None
        self._check_replace(inode, victim, new_parent)
        now = self._now()
        moved = inode.is_folder and parent != new_parent
        with self.journal.transaction():
            self._note_name(source, name, inode, "rename")
            if victim is not None:
                self._lose_name(victim, new_parent, new_name, now)
            self.journal.delete_dentry(parent, name)
            self.journal.set_dentry(new_parent, new_name, inode.ino)
            self.journal.update(inode.ino, parent=new_parent, name=new_name, ctime_ns=now)
            replaced_folder = victim is not None and victim.is_folder
            if source is not target:
                self._touch_folder(source, now, links=-1 if moved else 0)
            links = (1 if moved else 0) - (1 if replaced_folder else 0)
            self._touch_folder(target, now, links=links)
            inode.parent, inode.name, inode.ctime_ns = new_parent, new_name, now
            self._moved(inode)
            self._note_name(target, new_name, inode, "renamed")

    def _exchange(self, inode: Inode, source: Inode, target: Inode, new_name: bytes) -> None:
        name = inode.name
        assert name is not None, "find() names what it returns"
        other = self.find(target.ino, new_name)
        inode = self.find(source.ino, name)
        self._check_loop(inode, target.ino)
        self._check_loop(other, source.ino)
        now = self._now()
        with self.journal.transaction():
            self._note_name(source, name, inode, "rename")
            self._note_name(target, new_name, other, "rename")
            for one, place, called in ((inode, target, new_name), (other, source, name)):
                self.journal.set_dentry(place.ino, called, one.ino)
                self.journal.update(one.ino, parent=place.ino, name=called, ctime_ns=now)
            step = int(inode.is_folder) - int(other.is_folder)
            if source is target:
                step = 0
            else:
                self._touch_folder(source, now, links=-step)
            self._touch_folder(target, now, links=step)
            for one, place, called in ((inode, target, new_name), (other, source, name)):
                one.parent, one.name, one.ctime_ns = place.ino, called, now
                self._moved(one)
                self._note_name(place, called, one, "renamed")

    def _check_replace(self, inode: Inode, victim: Inode | None, new_parent: int) -> None:
        if inode.is_folder:
            self._check_loop(inode, new_parent)
        if victim is None:
            return
        if inode.is_folder and not victim.is_folder:
            raise _error(errno.ENOTDIR)
        if not inode.is_folder and victim.is_folder:
            raise _error(errno.EISDIR)
        if victim.is_folder and self.journal.has_children(victim.ino):
            raise _error(errno.ENOTEMPTY)

    def _check_loop(self, inode: Inode, folder: int) -> None:
        """Refuse to move a folder below itself."""
        if not inode.is_folder:
            return
        place: int | None = folder
        for _ in range(PATH_DEPTH_MAX):
            if place is None or place == ROOT_INO:
                return
            if place == inode.ino:
                raise _error(errno.EINVAL)
            above = self.inodes.get(place)
            place = above.parent if above is not None else None

    # -- attributes -----------------------------------------------------------------------

    async def setattr(self, ino: int, change: Change) -> Inode:
        """Set attributes; a change of size may have to fetch the chunk it cuts.

        Raises:
            HpkfsError: that chunk cannot be fetched; nothing was changed.
        """
        inode = self.get(ino)
        if change.size is not None:
            if inode.is_folder:
                raise _error(errno.EISDIR)
            await self._truncate(inode, change.size)
        now = self._now()
        columns: dict[str, object] = {"ctime_ns": now}
        if change.mode is not None:
            columns["mode"] = stat.S_IFMT(inode.mode) | (change.mode & 0o7777)
        for name in ("uid", "gid", "atime_ns", "mtime_ns"):
            value = getattr(change, name)
            if value is not None:
                columns[name] = max(TIME_NS_MIN, min(value, TIME_NS_MAX))
                self._see_time(value)
        with self.journal.transaction():
            self.journal.update(ino, **columns)
            if len(columns) > 1:
                self._note(inode, "setattr", quiet=_same(inode, columns))
        inode.generation = next(self._generations)
        for name, value in columns.items():
            setattr(inode, name, value)
        if change.mtime_ns is not None and inode.is_file and _backed(inode):
            self.content.set_mtime(inode, inode.mtime_ns)
        return inode

    def get_xattr(self, ino: int, name: bytes) -> bytes | None:
        """One extended attribute, or None."""
        return self.journal.get_xattr(ino, name)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        inode = self.get(ino)
        with self.journal.transaction():
            self.journal.set_xattr(ino, name, value)
            self._note(inode, "setxattr")

    def remove_xattr(self, ino: int, name: bytes) -> None:
        """Remove an extended attribute; ENODATA when there is none."""
        inode = self.get(ino)
        if self.journal.get_xattr(ino, name) is None:
            raise _error(errno.ENODATA)
        with self.journal.transaction():
            self.journal.remove_xattr(ino, name)
            self._note(inode, "removexattr")

    # -- content --------------------------------------------------------------------------

    async def read(self, ino: int, offset: int, size: int) -> bytes:
        """Bytes of a file; absent chunks are fetched first."""
        inode = self.inodes.get(ino)
        if inode is None:
            raise _error(errno.ENOENT)
        return await self.content.read(inode, offset, size)

    async def write(self, ino: int, offset: int, data: bytes) -> int:
        """Write through to the backing file; the bytes survive the daemon when this returns.

        Raises:
            QuotaError: the disk is full even after clean chunks were evicted; nothing is lost.
            HpkfsError: a chunk that is only partly overwritten cannot be fetched.
        """
        inode = self.inodes.get(ino)
        if inode is None:
            raise _error(errno.ENOENT)
        end = offset + len(data)
        await self.content.before_write(inode, offset, end)
        try:
            return self._write_now(inode, offset, data)
        except QuotaError:
            await self.make_room(len(data))
        await self.content.before_write(inode, offset, end)
        return self._write_now(inode, offset, data)

    def _write_now(self, inode: Inode, offset: int, data: bytes) -> int:
        absent = self._mark_dirty(inode, offset, offset + len(data))
        inode.stale = True
        inode.written_ns = self._now()
        inode.generation = next(self._generations)
        # A chunk that is still absent counts only when all of it is written.
        written = self.content.write(inode, offset, data, partly=not absent)
        if absent:
            self._mark_chunks(inode, absent)
        if inode.zone is not False or inode.zone_epoch != self.zone_epoch or inode.nlink > 1:
            self._changed(inode)
        return written

    async def _truncate(self, inode: Inode, size: int) -> None:
        if size < inode.size:
            await self.content.before_write(inode, size, inode.size)
        # re-check: the size may have moved while a chunk was fetched
        if inode.stale:
            self._refresh(inode)
        old = inode.size
        if size == 0 and inode.record_text is not None:
            self._detach(inode)
        else:
            absent = self._mark_dirty(inode, min(size, old), max(size, old))
            self.content.resize(inode, size)
            inode.stale = True  # even if the journal takes no more, the size is this one
            if absent:
                self._mark_chunks(inode, absent)
        inode.stale = True
        inode.written_ns = self._now()
        inode.generation = next(self._generations)
        self._refresh(inode)
        self._changed(inode)

    def _detach(self, inode: Inode) -> None:
        """Empty a file that has a record: nothing of it needs to be fetched any more.

        Where chunks are absent the journal notes first that the backing file is to be emptied:
        should the daemon die in between, recovery does it, and no hole is taken for content.
        """
        marker = f"emptied:{inode.ino}" if inode.absent else None
        self.content.fd(inode)
        with self.journal.transaction():
            self.journal.update(inode.ino, record=None, states=None, dirty=1)
            if marker is not None:
                self.journal.set_meta(marker, "1")
            self._note(inode, "write")
        inode.set_record(None, bytearray())
        inode.dirty = 1
        self.content.resize(inode, 0)
        if marker is not None:
            self._emptied.add(inode.ino)
            with contextlib.suppress(QuotaError):  # then before the next write
                self._is_emptied(inode.ino)

    def _is_emptied(self, ino: int) -> None:
        """Take back the journal's order to empty a file; what is written from now on stays."""
        self.journal.set_meta(f"emptied:{ino}", None)
        self._emptied.discard(ino)

    def _mark_dirty(self, inode: Inode, start: int, end: int) -> list[int]:
        """Record that [start, end) is about to change; returns absent chunks to mark afterwards.

        A clean chunk is marked before its bytes change. An absent one is marked after, when the
        new bytes are in place: until then the journal rightly says that it must be fetched.
        """
        if inode.ino in self._emptied:
            self._is_emptied(inode.ino)
        clean, absent = self.content.dirty_chunks(inode, start, end)
        if inode.dirty and not clean:
            return absent
        states = bytearray(inode.states)
        for index in clean:
            states[index] = DIRTY
        first = not inode.dirty
        if first and inode.is_file:
            self.content.fd(inode)  # the backing file now becomes the authority for the size
        with self.journal.transaction():
            if inode.record_text is not None:
                self.journal.update(inode.ino, dirty=1, states=bytes(states))
            else:
                self.journal.update(inode.ino, dirty=1)
            if first:
                self._note(inode, "write")
        inode.states = states
        inode.dirty = 1
        return absent

    def _mark_chunks(self, inode: Inode, indexes: Iterable[int]) -> None:
        states = bytearray(inode.states)
        for index in indexes:
            states[index] = DIRTY
        self.journal.update(inode.ino, states=bytes(states))
        inode.states = states
        inode.count_absent()

    async def fsync(self, ino: int, *, data_only: bool) -> None:
        """Make the file's bytes and every operation before this one survive a power cut."""
        inode = self.inodes.get(ino)
        if inode is None:
            raise _error(errno.ENOENT)
        if not inode.is_file:
            await self.sync_journal()
            return
        self.content.save_states()
        await self.content.fsync(inode, data_only=data_only)

    async def sync_journal(self) -> None:
        """Make every operation before this one survive a power cut."""
        await trio.to_thread.run_sync(self.journal.sync)

    def keep_reserve(self) -> None:
        """Put space by again, where it was used."""
        self._reserve.take()

    async def make_room(self, wanted_bytes: int) -> int:
        """Evict clean chunks of files that nobody holds open; returns the bytes freed."""
        freed = 0
        self._reserve.give()  # the journal notes what goes, and that takes space
        try:
            for ino, _states in self.journal.with_states():
                inode = self.inodes.get(ino)
                if inode is None or self.is_open(ino):
                    continue
                freed += await self.content.evict([inode], keep=lambda _inode: False)
                if freed >= wanted_bytes + RESERVE_BYTES:
                    break
        finally:
            self._reserve.take()
        return freed

    # -- changes that come from a checkpoint ----------------------------------------------

    def detach_name(self, parent: int, name: bytes) -> Inode:
        """Take a name out of the tree, inside the caller's transaction and without a log row."""
        inode = self.find(parent, name)
        now = self._now()
        self.journal.delete_dentry(parent, name)
        self._touch_folder(self.get(parent), now, links=-1 if inode.is_folder else 0)
        self._lose_name(inode, parent, name, now)
        return inode

    async def replace_file(self, path: str, data: bytes, *, mode: int = 0o600) -> Replaced:
        """Put a new file in the place of a top-level one, as a write beside it and a rename do.

        Durable when it returns. The owner and mode of a file that was there are kept. It is no
        change of the user's, so nothing becomes dirty by it.
        """
        name = os.fsencode(path)
        self._quiet = True
        try:
            return await self._replace_file(name, data, mode)
        finally:
            self._quiet = False

    async def _replace_file(self, name: bytes, data: bytes, mode: int) -> Replaced:
        known = self.journal.lookup(ROOT_INO, name)
        old = self.get(known) if known is not None else None
        root = self.get(ROOT_INO)
        owner = Caller(old.uid, old.gid) if old else Caller(root.uid, root.gid)
        mode = stat.S_IMODE(old.mode) if old else mode
        beside = b"." + name + b".hpkfs.tmp"
        if self.journal.lookup(ROOT_INO, beside) is not None:
            self.unlink(ROOT_INO, beside)  # a daemon was killed, or the disk was full, right here
        inode = self.make(ROOT_INO, beside, mode=stat.S_IFREG | mode, caller=owner)
        await self.write(inode.ino, 0, data)
        await self.fsync(inode.ino, data_only=False)
        self.rename(ROOT_INO, beside, ROOT_INO, name)
        self.forget(inode.ino, 1)
        return Replaced(ROOT_INO, name, known or 0)

    # -- zones and changes ----------------------------------------------------------------

    def set_policy(self, policy: Policy) -> None:
        """Replace the rules of what travels."""
        self.policy = policy
        self.zone_epoch += 1

    def matters(self, inode: Inode) -> bool:
        """Whether a change of this inode may change what travels.

        For a folder: whether anything in it can travel. For a file: whether it travels, or is
        the sidecar of a database that does.
        """
        unknown: list[Inode] = []
        place: Inode | None = inode
        while place is not None and place.zone_epoch != self.zone_epoch:
            unknown.append(place)
            above = None if place.ino == ROOT_INO else place.parent
            place = None if above is None else self.inodes.get(above)
        # Downwards, and not by recursion: a tree may be deeper than Python's stack.
        answer = place is None or bool(place.zone)
        for one in reversed(unknown):
            if answer and one.ino != ROOT_INO:
                answer = self._decide(self.path_of(one), is_folder=one.is_folder)
            one.zone, one.zone_epoch = answer, self.zone_epoch
        return answer

    def _decide(self, path: str, *, is_folder: bool) -> bool:
        if is_folder:
            return len(path) <= MAX_PATH_BYTES and not self.policy.prunes(path)
        name = os.fsencode(path)
        for suffix in DATABASE_SIDECARS:
            if name.endswith(suffix):
                path = os.fsdecode(name[: -len(suffix)])
        if path == "config.yaml":
            return True
        return self.policy.decide(path, is_folder=False).rule is Rule.TRAVELLING

    def _changed(self, inode: Inode) -> None:
        if not self._quiet and self._may_travel(inode):
            self._changed_now()

    def _changed_now(self) -> None:
        self.changed_last = time.monotonic()
        self.change_count += 1
        if self.changed_since is None:
            self.changed_since = self.changed_last

    def _note(self, inode: Inode, op: str, *, quiet: bool = False) -> None:
        """Log an operation on what travels, inside the caller's transaction."""
        self.operations += 1
        if quiet or self._quiet or not self._may_travel(inode):
            return
        self._changed_now()
        path = self.path_of(inode) if self.matters(inode) else ""
        self.journal.log(time.time_ns(), op, _loggable(path))

    def _note_name(self, folder: Inode, name: bytes, inode: Inode, op: str) -> None:
        """Like `_note`, for what happens to one name: a file may have others in the other zone."""
        self.operations += 1
        if self._quiet or not self.matters(folder):
            return
        path = os.path.join(self.path_of(folder), os.fsdecode(name))
        if self._decide(path, is_folder=inode.is_folder):
            self._changed_now()
            self.journal.log(time.time_ns(), op, _loggable(path))

    def _may_travel(self, inode: Inode) -> bool:
        """Whether a change may matter. Of several names any may travel; none, and it is gone.

        Which names there are only a scan of the journal would tell: too slow for each write, and
        a seal that finds nothing costs little (test_regression_a_write_through_a_local_hard_link).
        """
        if inode.is_folder:
            return self.matters(inode)
        return inode.nlink > 1 or (inode.nlink == 1 and self.matters(inode))

    def _moved(self, inode: Inode) -> None:
        """A path changed: what it means for travelling must be asked again."""
        if inode.is_folder:
            self.zone_epoch += 1
        else:
            inode.zone_epoch = -1

    def _reload(self) -> None:
        """A transaction failed: memory goes back to what the journal says."""
        self.inodes.reload()
        self._dead = {ino for ino in self._dead if (i := self.inodes.get(ino)) and not i.nlink}

    # -- small helpers --------------------------------------------------------------------

    def _now(self) -> int:
        return max(time.clock_gettime_ns(CLOCK_REALTIME_COARSE), self._newest_ns)

    def _see_time(self, time_ns: int) -> None:
        """A kernel from 6.13 on may stamp within a tick: what comes later is not to seem older."""
        if self._newest_ns < time_ns <= time.time_ns():
            self._newest_ns = time_ns

    def _folder(self, ino: int) -> Inode:
        folder = self.get(ino)
        if not folder.is_folder:
            raise _error(errno.ENOTDIR)
        if folder.nlink == 0:
            raise _error(errno.ENOENT)
        return folder

    def _touch_folder(self, folder: Inode, now: int, *, links: int = 0) -> None:
        nlink = folder.nlink + links
        self.journal.update(folder.ino, mtime_ns=now, ctime_ns=now, nlink=nlink)
        folder.mtime_ns = folder.ctime_ns = now
        folder.nlink = nlink

    def _lose_name(self, inode: Inode, parent: int, name: bytes, now: int) -> None:
        """One name fewer, inside the caller's transaction."""
        nlink = 0 if inode.is_folder else inode.nlink - 1
        columns: dict[str, object] = {"nlink": nlink, "ctime_ns": now}
        if (inode.parent, inode.name) == (parent, name) and nlink:
            columns["name"] = None
            inode.name = None
        self.journal.update(inode.ino, **columns)
        inode.nlink, inode.ctime_ns = nlink, now
        inode.zone_epoch = -1
        if nlink == 0:
            self._dead.add(inode.ino)

    def _refresh(self, inode: Inode) -> None:
        self.content.refresh(inode)
        if inode.dirty and inode.absent:
            self._drop_chunks_beyond_end(inode)

    def _drop_chunks_beyond_end(self, inode: Inode) -> None:
        """A truncate that the daemon did not survive: what lies beyond the end is gone."""
        record = inode.record
        if record is None or inode.size >= record.size:
            return
        _, absent = self.content.dirty_chunks(inode, inode.size, record.size)
        beyond = [i for i in absent if sum(p.size for p in record.pieces[:i]) >= inode.size]
        if beyond:
            self._mark_chunks(inode, beyond)


def _backed(inode: Inode) -> bool:
    """Whether the backing file is the authority for size and mtime."""
    return bool(inode.dirty) or inode.record_text is None


def _same(inode: Inode, columns: dict[str, object]) -> bool:
    """Whether nothing but ctime and atime would change: Hermes repeats its chmods at each start."""
    return all(
        getattr(inode, name) == value
        for name, value in columns.items()
        if name not in ("ctime_ns", "atime_ns")
    )


def _check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise _error(errno.ENAMETOOLONG)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise _error(errno.EEXIST if name in (b".", b"..") else errno.EINVAL)


def _loggable(path: str) -> str:
    """A path as text for the operation log: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
