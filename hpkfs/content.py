"""Backing files: the bytes of every regular file, which chunks are here, and how the rest comes.

Owned by `volume.py`, which decides the order of a mutation; this module moves bytes. Invariants:
a chunk marked hydrated has been verified against its piece; a chunk that cannot be fetched is an
error and never zeros; a hydration or an eviction never changes a file's mtime; a cut (below)
sees each file as of one instant while writers go on.

Small reads and writes of the page cache stay on the event loop (a thread hop costs more than the
call); fetching, hashing, fsync and bulk copies go to threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import shutil
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import trio

from hpkfs.core.chunks import starts
from hpkfs.core.limits import PIECE_SIZE
from hpkfs.cut import FileCut
from hpkfs.errors import HpkfsError, IntegrityError, QuotaError
from hpkfs.inodes import ABSENT, HYDRATED, UNVERIFIED, Inode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from hpkfs.core.documents import FileRecord, Piece
    from hpkfs.durable import Disk
    from hpkfs.journal import Journal
    from hpkfs.objects import ObjectStore

log = logging.getLogger(__name__)

OPEN_FILES_MAX = 512
SPARE_FILES_MAX = 1_024
READ_AHEAD_CHUNKS = 8
BACKGROUND_FETCHES_MAX = 16
READ_AHEAD_QUEUE_MAX = 256
STARTS_CACHED_MAX = 256
TOUCHED_INODES_MAX = 2_048

_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, fallocate(2)


class Content:
    """The backing files of one state directory."""

    def __init__(self, folder: str, *, journal: Journal, objects: ObjectStore, disk: Disk) -> None:
        self._folder = folder
        self._journal = journal
        self._objects = objects
        self._disk = disk
        self._fds: OrderedDict[int, int] = OrderedDict()
        # Chunks hydrated since the start: whoever bounds them sees whether there are new ones.
        self.fetches = 0
        self._suspect: set[int] = set()
        self._spare_folder = f"{folder}.spare"
        self._spares: list[str] = []
        shutil.rmtree(self._spare_folder, ignore_errors=True)
        os.mkdir(self._spare_folder, 0o700)
        self._fetching: dict[tuple[int, int], trio.Event] = {}
        self._cuts: dict[int, FileCut] = {}
        self._unsaved_states: dict[int, Inode] = {}
        self._new_names = False
        self._background = trio.CapacityLimiter(BACKGROUND_FETCHES_MAX)
        self._ahead_in, self._ahead_out = trio.open_memory_channel[tuple[Inode, int]](
            READ_AHEAD_QUEUE_MAX
        )
        # While a start is recorded: the 1 MiB ranges read of each inode.
        self.touched: dict[int, set[int]] | None = None
        self._starts: OrderedDict[int, tuple[FileRecord, tuple[int, ...]]] = OrderedDict()

    # -- long-lived task ------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve read-ahead until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(READ_AHEAD_CHUNKS):
                nursery.start_soon(self._read_ahead_worker)
            task_status.started()

    async def _read_ahead_worker(self) -> None:
        async for inode, index in self._ahead_out:
            try:
                await self.hydrate_chunk(inode, index)
            except HpkfsError as error:
                log.debug("read-ahead of inode %d stopped: %s", inode.ino, error)

    # -- files on disk --------------------------------------------------------------------

    def path(self, ino: int) -> str:
        """Where the bytes of an inode are."""
        return f"{self._folder}/{ino}"

    def create(self, ino: int, mtime_ns: int) -> None:
        """Make an empty backing file for a new inode, with the time that its creator is told.

        An emptied one is used again where there is any: ext4 searches long for a new inode while
        many were deleted a moment ago (`recently_deleted` in its source).
        """
        path = self.path(ino)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if self._spares:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._spares.pop(), path)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        self._new_names = True
        self._remember(ino, fd)

    def fd(self, inode: Inode) -> int:
        """An open descriptor of the backing file; valid until the next call of this module."""
        fd = self._fds.get(inode.ino)
        if fd is not None:
            self._fds.move_to_end(inode.ino)
            return fd
        path = self.path(inode.ino)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if inode.record_text is not None:
                self._lost(inode)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._new_names = True
            if inode.record_text is not None:
                os.ftruncate(fd, inode.size)
        self._remember(inode.ino, fd)
        return fd

    def _remember(self, ino: int, fd: int) -> None:
        old = self._fds.pop(ino, None)
        if old is not None:
            os.close(old)
        self._fds[ino] = fd
        if len(self._fds) > OPEN_FILES_MAX:
            _, oldest = self._fds.popitem(last=False)
            os.close(oldest)

    def _lost(self, inode: Inode) -> None:
        """The backing file of a file with a record is gone: the record is what is left of it.

        A power cut does this to a file that was never synced; its clean chunks come again.
        """
        if not inode.dirty and all(state == ABSENT for state in inode.states):
            return  # it never had one
        log.warning("the bytes of inode %d are gone; the store's version is fetched", inode.ino)
        record = inode.record
        assert record is not None, "only files with a record"
        states = bytearray([ABSENT]) * len(record.pieces)
        self._journal.update(inode.ino, states=bytes(states), dirty=0, size=record.size)
        inode.set_record(record, states)
        inode.dirty = 0
        inode.size = record.size

    def forget(self, ino: int) -> None:
        """Close what is open of an inode."""
        fd = self._fds.pop(ino, None)
        if fd is not None:
            os.close(fd)
        self._unsaved_states.pop(ino, None)

    def remove(self, ino: int) -> None:
        """Give up a backing file whose inode is durably gone, or whose bytes are not needed."""
        self.forget(ino)
        path = self.path(ino)
        with contextlib.suppress(FileNotFoundError):
            if ino in self._cuts or len(self._spares) >= SPARE_FILES_MAX:
                os.unlink(path)  # a cut reads on from the bytes that it holds open
                return
            # Emptied through a descriptor, closed while empty: ext4 writes a file out at the next
            # close after its truncation (auto_da_alloc, ext4(5)), which must not be our user's.
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC))
            spare = f"{self._spare_folder}/{ino}"
            os.rename(path, spare)
            self._spares.append(spare)

    def refresh(self, inode: Inode) -> None:
        """Read size and mtime from the backing file after writes."""
        inode.stale = False
        fd = self._fds.get(inode.ino)
        try:
            found = os.fstat(fd) if fd is not None else os.stat(self.path(inode.ino))
        except FileNotFoundError:
            if inode.record_text is None:
                inode.size = 0
            else:
                self._lost(inode)
            return
        inode.size = found.st_size
        inode.mtime_ns = found.st_mtime_ns
        if inode.written_ns:
            inode.mtime_ns = inode.written_ns
            os.utime(self.path(inode.ino) if fd is None else fd, ns=(inode.mtime_ns,) * 2)
        inode.written_ns = 0
        inode.ctime_ns = max(inode.ctime_ns, inode.mtime_ns)

    def set_mtime(self, inode: Inode, mtime_ns: int) -> None:
        """Put a time on a backing file that is the authority for it."""
        inode.written_ns = 0
        os.utime(self.fd(inode), ns=(mtime_ns, mtime_ns))

    # -- reading --------------------------------------------------------------------------

    async def read(self, inode: Inode, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of a file, shorter at its end.

        Raises:
            HpkfsError: a chunk is absent and cannot be fetched; a later read tries again.
        """
        if self.touched is not None:
            self._note_touched(inode.ino, offset, size)
        self.fd(inode)  # should the bytes be gone, its chunks are absent now
        if inode.absent:
            try:
                await self.ensure(inode, offset, offset + size)
            except QuotaError:
                return await self._read_through(inode, offset, size)
        return os.pread(self.fd(inode), size, offset)

    def _note_touched(self, ino: int, offset: int, size: int) -> None:
        assert self.touched is not None, "asked before"
        if len(self.touched) < TOUCHED_INODES_MAX:
            ranges = self.touched.setdefault(ino, set())
            ranges.update(
                range(offset // PIECE_SIZE, (offset + max(size, 1) - 1) // PIECE_SIZE + 1)
            )

    async def ensure(self, inode: Inode, start: int, end: int) -> None:
        """Hydrate the chunks that [start, end) touches."""
        record = inode.record
        if record is None or not inode.absent:
            return
        indexes = self._touched(inode, record, start, end)
        missing = [i for i in indexes if inode.states[i] in (ABSENT, UNVERIFIED)]
        if not missing:
            return
        self._ask_read_ahead(inode, missing[-1])
        if len(missing) == 1:
            await self.hydrate_chunk(inode, missing[0], waiting_reader=True)
            return
        await _all([partial(self.hydrate_chunk, inode, i, waiting_reader=True) for i in missing])

    async def hydrate(self, inode: Inode) -> int:
        """Hydrate a whole file, in the background's share of the requests.

        Returns:
            The number of bytes fetched.
        """
        record = inode.record
        if record is None or not inode.absent:
            return 0
        missing = [i for i, state in enumerate(inode.states) if state in (ABSENT, UNVERIFIED)]
        await _all([partial(self.hydrate_chunk, inode, i) for i in missing])
        return sum(record.pieces[i].size for i in missing)

    async def hydrate_range(self, inode: Inode, number: int) -> None:
        """Hydrate the chunks of the 1 MiB range `number`, in the background's share."""
        record = inode.record
        if record is not None:
            start = number * PIECE_SIZE
            for index in self._touched(inode, record, start, start + PIECE_SIZE):
                await self.hydrate_chunk(inode, index)

    async def hydrate_chunk(
        self, inode: Inode, index: int, *, waiting_reader: bool = False
    ) -> None:
        """Fetch, verify and store one chunk; readers of the same chunk share one fetch."""
        key = (inode.ino, index)
        while index < len(inode.states) and inode.states[index] in (ABSENT, UNVERIFIED):
            running = self._fetching.get(key)
            if running is not None:
                await running.wait()
                continue  # re-check: it may have failed, then this caller tries itself
            done = self._fetching[key] = trio.Event()
            try:
                if waiting_reader:
                    await self._fetch(inode, index)
                else:
                    async with self._background:
                        await self._fetch(inode, index)
            finally:
                del self._fetching[key]
                done.set()

    async def _fetch(self, inode: Inode, index: int) -> None:
        record = inode.record
        if record is None or inode.states[index] not in (ABSENT, UNVERIFIED):
            return
        piece = record.pieces[index]
        offset = self._offsets(inode.ino, record)[index]
        if inode.states[index] == UNVERIFIED and await self._is_intact(inode, offset, piece):
            if inode.record is record and inode.states[index] == UNVERIFIED:
                self._mark_hydrated(inode, index)
            return
        data = await self._objects.get(piece, keep=False)
        # re-check: a write or a truncate may have taken the chunk, or the file, meanwhile
        if inode.record is not record or inode.states[index] not in (ABSENT, UNVERIFIED):
            return
        fd = self.fd(inode)
        before = os.fstat(fd).st_mtime_ns
        pwrite_all(fd, data, offset)
        if inode.dirty:
            os.utime(fd, ns=(before, before))
        self._mark_hydrated(inode, index)

    async def _is_intact(self, inode: Inode, offset: int, piece: Piece) -> bool:
        """Whether a chunk written before a power cut is what its digest says."""
        fd = os.dup(self.fd(inode))
        try:
            data = await trio.to_thread.run_sync(os.pread, fd, piece.size, offset)
            digest = await trio.to_thread.run_sync(hashlib.sha256, data)
        finally:
            os.close(fd)
        return digest.hexdigest() == piece.sha256

    def _mark_hydrated(self, inode: Inode, index: int) -> None:
        inode.states[index] = HYDRATED
        inode.count_absent()
        self._unsaved_states[inode.ino] = inode
        self.fetches += 1

    def save_states(self) -> None:
        """Note the chunks hydrated since the last call; lost ones would only be fetched again."""
        if not self._unsaved_states:
            return
        waiting, self._unsaved_states = self._unsaved_states, {}
        try:
            self._journal.set_states(
                (bytes(inode.states), ino)
                for ino, inode in waiting.items()
                if inode.record_text is not None
            )
        except HpkfsError:
            self._unsaved_states.update(waiting)
            raise

    async def _read_through(self, inode: Inode, offset: int, size: int) -> bytes:
        """Read without storing: the disk is full, but what is asked for can still be had."""
        record = inode.record
        if record is None:
            return os.pread(self.fd(inode), size, offset)
        parts: list[bytes] = []
        places = self._offsets(inode.ino, record)
        end = min(offset + size, inode.size)
        for index in self._touched(inode, record, offset, end):
            first, last = places[index], places[index] + record.pieces[index].size
            wanted = (max(first, offset), min(last, end))
            if inode.states[index] in (ABSENT, UNVERIFIED):
                data = await self._objects.get(record.pieces[index], keep=False)
                parts.append(data[wanted[0] - first : wanted[1] - first])
            else:
                parts.append(os.pread(self.fd(inode), wanted[1] - wanted[0], wanted[0]))
        tail = max(offset, record.size)
        if tail < end:
            parts.append(os.pread(self.fd(inode), end - tail, tail))
        return b"".join(parts)

    def _ask_read_ahead(self, inode: Inode, index: int) -> None:
        """A reader missed chunk `index`: the next ones will probably be wanted too."""
        if index and inode.states[index - 1] in (ABSENT, UNVERIFIED):
            return  # not a sequential reader
        for following in range(index + 1, min(index + 1 + READ_AHEAD_CHUNKS, len(inode.states))):
            if inode.states[following] in (ABSENT, UNVERIFIED):
                try:
                    self._ahead_in.send_nowait((inode, following))
                except trio.WouldBlock:
                    return

    def _offsets(self, ino: int, record: FileRecord) -> tuple[int, ...]:
        cached = self._starts.get(ino)
        if cached is not None and cached[0] is record:
            return cached[1]
        offsets = starts(record)
        self._starts[ino] = (record, offsets)
        if len(self._starts) > STARTS_CACHED_MAX:
            self._starts.popitem(last=False)
        return offsets

    def _touched(self, inode: Inode, record: FileRecord, start: int, end: int) -> range:
        """Indexes of the pieces that [start, end) touches."""
        end = min(end, record.size)
        if start >= end or not record.pieces:
            return range(0)
        offsets = self._offsets(inode.ino, record)
        return range(bisect_right(offsets, start) - 1, bisect_right(offsets, end - 1))

    # -- writing --------------------------------------------------------------------------

    async def before_write(self, inode: Inode, start: int, end: int) -> None:
        """Make [start, end) ready to be overwritten: fetch what a chunk keeps, save a cut's bytes.

        No await follows the last check, so the caller may write at once when this returns.
        """
        self._check_sound(inode)
        while True:
            if inode.absent and inode.record is not None:
                kept_in_part = self._partial(inode, inode.record, start, end)
                if kept_in_part:
                    for index in kept_in_part:
                        await self.hydrate_chunk(inode, index, waiting_reader=True)
                    continue  # re-check: states moved while we waited
            break
        done = None
        while (cut := self._cuts.get(inode.ino)) is not None and cut is not done:
            await cut.before_write(start, end)
            done = cut

    def _partial(self, inode: Inode, record: FileRecord, start: int, end: int) -> list[int]:
        """Absent chunks of which a write to [start, end) keeps a part."""
        found = []
        offsets = self._offsets(inode.ino, record)
        for index in self._touched(inode, record, start, end):
            first, last = offsets[index], offsets[index] + record.pieces[index].size
            covers = start <= first and end >= last
            if not covers and inode.states[index] in (ABSENT, UNVERIFIED):
                found.append(index)
        return found

    def _check_sound(self, inode: Inode) -> None:
        if inode.ino in self._suspect:
            raise IntegrityError(
                "The disk of the state directory failed while this file was made durable.",
                kept="What the file shows is still there to be read; copy it.",
                next_step="Check the disk, then unmount and mount again.",
            )

    def dirty_chunks(self, inode: Inode, start: int, end: int) -> tuple[list[int], list[int]]:
        """Clean and absent chunks that a write to [start, end) makes dirty."""
        record = inode.record
        clean: list[int] = []
        absent: list[int] = []
        if record is None:
            return clean, absent
        for index in self._touched(inode, record, start, end):
            if inode.states[index] == HYDRATED:
                clean.append(index)
            elif inode.states[index] in (ABSENT, UNVERIFIED):
                absent.append(index)
        return clean, absent

    def write(self, inode: Inode, offset: int, data: bytes, *, partly: bool) -> int:
        """Put bytes into the backing file; `partly` allows a full disk to take a part of them."""
        return pwrite_all(self.fd(inode), data, offset, partly=partly)

    def resize(self, inode: Inode, size: int) -> None:
        """Set the length of the backing file."""
        os.ftruncate(self.fd(inode), size)

    async def fsync(self, inode: Inode, *, data_only: bool) -> None:
        """Make a file's bytes, then the journal, durable.

        After the disk failed once here the file takes no more writes until the next mount: the
        kernel drops the pages that it could not write, so a second fsync would succeed falsely.
        """
        self._check_sound(inode)
        fd = os.dup(self.fd(inode))
        new_names, self._new_names = self._new_names, False
        try:
            await trio.to_thread.run_sync(self._fsync, fd, data_only, new_names)
        except BaseException as error:
            self._new_names |= new_names
            if isinstance(error, IntegrityError):
                self._suspect.add(inode.ino)
                log.error("the disk failed under inode %d; it takes no more writes", inode.ino)
            raise
        finally:
            os.close(fd)

    def _fsync(self, fd: int, data_only: bool, new_names: bool) -> None:
        if data_only:
            self._disk.fdatasync_file(fd, point="backing.data.fsync")
        else:
            self._disk.fsync_file(fd, point="backing.file.fsync")
        if new_names:
            self._disk.fsync_folder(self._folder, point="backing.folder.fsync")
        self._journal.sync()

    # -- cuts and eviction ----------------------------------------------------------------

    def cut(self, inode: Inode) -> FileCut:
        """Freeze a file's bytes for a reader; end it with `end_cut`. The file must be whole."""
        assert not inode.absent, "a cut needs every chunk"
        assert inode.ino not in self._cuts, "one cut of a file at a time"
        fd = self.fd(inode)
        made = self._cuts[inode.ino] = FileCut(fd, os.fstat(fd).st_size)
        return made

    def end_cut(self, inode: Inode) -> None:
        """The reader is done."""
        cut = self._cuts.pop(inode.ino, None)
        if cut is not None:
            cut.close()

    def chunk_bytes(self, inode: Inode, name: str) -> bytes | None:
        """What the backing file holds of the chunk whose object has this name; None: no such."""
        record = inode.record
        if record is None:
            return None
        for index, piece in enumerate(record.pieces):
            if piece.object == name and inode.states[index] == HYDRATED:
                offset = self._offsets(inode.ino, record)[index]
                return os.pread(self.fd(inode), piece.size, offset)
        return None

    def evictable_bytes(self, inode: Inode) -> int:
        """Bytes that `evict` would free."""
        record = inode.record
        if record is None:
            return 0
        return sum(
            piece.size
            for piece, state in zip(record.pieces, inode.states, strict=True)
            if state in (HYDRATED, UNVERIFIED)
        )

    async def evict(self, inodes: Iterable[Inode], *, keep: Callable[[Inode], bool]) -> int:
        """Drop clean chunks. The space is released after the journal is durable.

        Returns:
            The number of bytes freed.
        """
        chosen: list[tuple[Inode, FileRecord, list[int]]] = []
        with self._journal.transaction():
            for inode in inodes:
                record = inode.record
                if record is None or inode.ino in self._cuts or keep(inode):
                    continue
                indexes = [i for i, s in enumerate(inode.states) if s in (HYDRATED, UNVERIFIED)]
                if indexes:
                    states = bytearray(inode.states)
                    for index in indexes:
                        states[index] = ABSENT
                    self._journal.update(inode.ino, states=bytes(states))
                    chosen.append((inode, record, indexes))
        for inode, _, indexes in chosen:
            for index in indexes:
                inode.states[index] = ABSENT
            inode.count_absent()
            self._unsaved_states.pop(inode.ino, None)
        await trio.to_thread.run_sync(self._journal.sync)
        freed = 0
        for inode, record, indexes in chosen:
            freed += self._release(inode, record, indexes)
        return freed

    def _release(self, inode: Inode, record: FileRecord, indexes: list[int]) -> int:
        # re-check: a reader may have fetched a chunk again while the journal was synced
        still = [i for i in indexes if inode.record is record and inode.states[i] == ABSENT]
        if not inode.dirty and len(still) == len(inode.states) == len(indexes):
            self.remove(inode.ino)
        else:
            fd = self.fd(inode)
            before = os.fstat(fd).st_mtime_ns
            offsets = self._offsets(inode.ino, record)
            for index in still:
                _punch_hole(fd, offsets[index], record.pieces[index].size)
            os.utime(fd, ns=(before, before))
        return sum(record.pieces[index].size for index in still)

    def close(self) -> None:
        """Close every descriptor; `save_states` comes first."""
        while self._fds:
            _, fd = self._fds.popitem()
            os.close(fd)


def pwrite_all(fd: int, data: bytes, offset: int, *, partly: bool = False) -> int:
    """Write all of `data`; ENOSPC and EDQUOT become `QuotaError`.

    With `partly` a disk that fills up in the middle answers what was written, as write(2) does.
    """
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(fd, data[written:] if written else data, offset + written)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if partly and written:
            return written
        raise QuotaError(
            "The disk of the state directory is full.",
            kept="Everything written before is safe; this write was not done.",
            next_step="Free space on that disk, or run `hpkfs evict`.",
        ) from error
    return written


def _punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the space of a range back; where that is not offered the bytes just stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.fallocate(
        ctypes.c_int(fd),
        ctypes.c_int(_PUNCH_HOLE_KEEP_SIZE),
        ctypes.c_longlong(offset),
        ctypes.c_longlong(length),
    )
    if result != 0:
        log.debug("punching a hole failed: errno %d", ctypes.get_errno())


async def _all(calls: list[Callable[[], Awaitable[object]]]) -> None:
    """Run coroutines together; the first failure is raised as it is, not as a group."""
    failures: list[HpkfsError | OSError] = []

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except (HpkfsError, OSError) as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(one, call)
    if failures:
        raise failures[0]
