"""A disk that fails, kills the process, or only takes notes, at the points of `durable.py`."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from hpkfs.durable import RealDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class FaultyDisk(RealDisk):
    """Raises the errno that `errors` names for a point, each time it is passed.

    `passed` has the points in the order in which they were passed. `errors` may be changed while
    the disk is in use, and so may `before`: what is called first at a point.
    """

    def __init__(self, errors: Mapping[str, int] | None = None) -> None:
        self.errors = dict(errors or {})
        self.before: dict[str, Callable[[], None]] = {}
        self.passed: list[str] = []

    def at(self, point: str) -> None:
        super().at(point)
        self.passed.append(point)
        if (act := self.before.get(point)) is not None:
            act()
        if (number := self.errors.get(point)) is not None:
            raise OSError(number, os.strerror(number))


class KillingDisk(RealDisk):
    """Kills this process with SIGKILL just before a point is passed for the `nth` time."""

    def __init__(self, point: str, *, nth: int = 1) -> None:
        self._point = point
        self._left = nth

    def at(self, point: str) -> None:
        super().at(point)
        if point == self._point:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
