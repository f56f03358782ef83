"""Space put by, so that a full disk can be made less full.

Eviction must note in the journal what it is about to drop, and on a full disk there is no room for
that note. `Volume.make_room` gives this file's space back first and takes it again afterwards.
Losing the file costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

RESERVE_BYTES: Final = 512 * 1024


class Reserve:
    """One file of `RESERVE_BYTES` that nobody reads. Blocking, and short."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.take()

    def take(self) -> bool:
        """Occupy the space; False where the disk has none to give."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size < RESERVE_BYTES:
                    os.posix_fallocate(fd, 0, RESERVE_BYTES)
            finally:
                os.close(fd)
        except OSError:
            self.give()
            return False
        return True

    def give(self) -> None:
        """Free the space."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
