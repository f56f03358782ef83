"""One file's bytes as of an instant, while writers go on: copy on write, by chunks of 1 MiB.

Made by `content.py` for a seal. Writers ask before they overwrite; the copy of a chunk in a thread
and a write to the same chunk exclude each other.
"""

from __future__ import annotations

import errno
import os

import trio

from hpkfs.core.limits import PIECE_SIZE

SAVED_CHUNKS_MAX = 64
COPY_BATCH_BYTES = 8 * PIECE_SIZE


class FileCut:
    """One file's bytes as of the instant the cut was taken, while writers go on.

    A writer calls `before_write` for the range it is about to change: a chunk that has not been
    copied yet is put aside first. The reader takes the chunks with `read` or `copy_to`.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = os.dup(fd)
        self._waiting = set(range((size + PIECE_SIZE - 1) // PIECE_SIZE))
        self._busy: dict[int, trio.Event] = {}
        self._saved: dict[int, bytes] = {}
        self._room = trio.Event()

    async def before_write(self, offset: int, end: int) -> None:
        """Put aside what [offset, end) still holds of the cut. No await follows the last check."""
        end = min(end, self.size)
        if offset >= end:
            return
        touched = range(offset // PIECE_SIZE, (end - 1) // PIECE_SIZE + 1)
        while True:
            busy = next((self._busy[index] for index in touched if index in self._busy), None)
            if busy is not None:
                await busy.wait()
                continue  # re-check: another chunk may have become busy meanwhile
            needed = [index for index in touched if index in self._waiting]
            if needed and len(self._saved) >= SAVED_CHUNKS_MAX:
                self._room = trio.Event()
                await self._room.wait()
                continue  # re-check: the reader moved on
            for index in needed:
                self._saved[index] = os.pread(self._fd, PIECE_SIZE, index * PIECE_SIZE)
                self._waiting.discard(index)
            return

    async def read(self, index: int) -> bytes:
        """The bytes of grid chunk `index` (1 MiB, the last one shorter); once for each."""
        length = min(PIECE_SIZE, self.size - index * PIECE_SIZE)
        if index in self._saved:
            data = self._saved.pop(index)
            self._room.set()
        else:
            self._waiting.discard(index)
            done = self._busy[index] = trio.Event()
            try:
                data = await trio.to_thread.run_sync(os.pread, self._fd, length, index * PIECE_SIZE)
            finally:
                del self._busy[index]
                done.set()
        return data[:length]

    async def copy_to(self, path: str) -> None:
        """Write the whole cut to a new file."""
        out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for first in range(0, self.size, COPY_BATCH_BYTES):
                last = min(first + COPY_BATCH_BYTES, self.size)
                indexes = range(first // PIECE_SIZE, (last - 1) // PIECE_SIZE + 1)
                saved = [index for index in indexes if index in self._saved]
                if saved:
                    for index in indexes:
                        data = await self.read(index)
                        await trio.to_thread.run_sync(os.pwrite, out, data, index * PIECE_SIZE)
                    continue
                done = trio.Event()
                for index in indexes:
                    self._waiting.discard(index)
                    self._busy[index] = done
                try:
                    await trio.to_thread.run_sync(_copy_range, self._fd, out, first, last)
                finally:
                    for index in indexes:
                        del self._busy[index]
                    done.set()
            os.ftruncate(out, self.size)
        finally:
            os.close(out)

    def close(self) -> None:
        """Let writers go on unhindered."""
        self._waiting.clear()
        self._saved.clear()
        self._room.set()
        os.close(self._fd)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    """Copy [start, end) from one descriptor to the same place in another."""
    position = start
    while position < end:
        try:
            count = os.copy_file_range(source, target, end - position, position, position)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            count = os.pwrite(target, os.pread(source, end - position, position), position)
        if count == 0:
            return
        position += count
