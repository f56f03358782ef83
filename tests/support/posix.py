"""System calls that Python lacks, and other processes, for tests of a mount."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROCESS_TIMEOUT_S = 60
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
AT_FDCWD = -100
NAME_BYTES_MAX = 255
CLOCK_REALTIME_COARSE = 5  # clock_gettime(2)


def refuses(number: int, call: Callable[[], object]) -> None:
    """Assert that a call fails with this errno."""
    with pytest.raises(OSError) as raised:  # noqa: PT011  # the errno is checked below
        call()
    found = errno.errorcode[raised.value.errno or 0]
    assert raised.value.errno == number, f"{found}, not {errno.errorcode[number]}"


def start(code: str, *args: object) -> subprocess.Popen[str]:
    """Start another process that runs this code."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for processes, which must end well; returns what they printed."""
    printed = [process.communicate(timeout=PROCESS_TIMEOUT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return printed


def renameat2(source: Path, target: Path, flags: int) -> None:
    """renameat2(2), which Python does not have."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(source), os.fsencode(target)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def pass_a_tick() -> None:
    """Wait until the clock that files are stamped from has moved on."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == before:
        os.sched_yield()
