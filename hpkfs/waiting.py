"""How the daemon waits for the kernel's next request: with it at first, then through trio.

A program that works on the mount sends its next request within microseconds of the last answer.
A pass of trio's loop costs more than most answers do, so the worker that has answered stays for
a moment and takes the next request itself. That blocks the loop; so it happens only while no
handler waits for anything (a fetch, an fsync), and never for longer than `STAY_S_MAX` in a row.

`mount.py` installs it. pyfuse3 looks its `trio` up by name at every call, so that its asyncio
mode can replace it (`pyfuse3/asyncio.py`); this comes in by the same door.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

import pyfuse3
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

# Long enough for the next request of one program, too short for anyone else to notice.
NEXT_REQUEST_S = 0.000_2
STAY_S_MAX = 0.002


def install(is_busy: Callable[[], bool]) -> None:
    """Wait in this way from now on.

    Args:
        is_busy: whether some handler has begun and waits for something.
    """
    pyfuse3.trio = KernelWait(is_busy)  # type: ignore[attr-defined]  # as pyfuse3.asyncio does


class KernelWait:
    """Stands for the module `trio` inside pyfuse3; all but the waiting is trio's own."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.lowlevel = LowLevel(is_busy)
        self.Lock = ReaderLock

    def __getattr__(self, name: str) -> object:
        return getattr(trio, name)


class LowLevel:
    """Stands for `trio.lowlevel` inside pyfuse3."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._stay_until = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        """Return when a request can be read; a checkpoint unless one comes at once.

        Raises:
            trio.ClosedResourceError: `notify_closing` was called meanwhile.
        """
        if time.monotonic() < self._stay_until and not self._is_busy():
            readable, _, _ = select.select((fd,), (), (), NEXT_REQUEST_S)
            if readable:
                return
        await trio.lowlevel.wait_readable(fd)
        self._stay_until = time.monotonic() + STAY_S_MAX


class ReaderLock:
    """One worker at a time waits for the kernel; who asks first when it is free has it.

    trio's own lock is handed to whoever waits longest, so every request would change the task.
    """

    def __init__(self) -> None:
        self._held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._waiting.park()
        self._held = True

    async def __aexit__(self, *_exc: object) -> None:
        self._held = False
        if self._waiting:
            self._waiting.unpark()
