"""What is printed: results for people or programs, messages, progress.

The commands use it. With `--json` stdout holds JSON and nothing else; what is said to people
besides goes to stderr.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from hpkfs import show
from hpkfs.errors import HpkfsError, QuotaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

PROGRESS_AFTER_S: Final = 1.0
PROGRESS_TERMINAL_S: Final = 0.2
PROGRESS_LINES_S: Final = 5.0


def explain(error: OSError) -> HpkfsError:
    """Make a sentence of what the system refused outside a mount."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = f"{show.clean(error.filename)}: " if error.filename else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return QuotaError(f"{where}{reason}.", next_step="Free some space, then try again.")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        next_step = "Make it accessible for you, or name another place."
        return UsageError(f"{where}{reason}.", next_step=next_step)
    return HpkfsError(f"{where}{reason}.", next_step="Check that path, then try again.")


def say(line: str) -> None:
    """Print a line of a result."""
    sys.stdout.write(line + "\n")


def warn(line: str) -> None:
    """Print a message."""
    sys.stderr.write(line + "\n")


def print_json(value: dict[str, Any]) -> None:
    """Print an object for programs, in one line."""
    say(json.dumps(value))


def print_result(result: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result for a program, or its lines for a person."""
    if as_json:
        print_json(result)
    else:
        for line in lines:
            say(line)


class Progress:
    """Shows on stderr how far work is: on a terminal one line, elsewhere a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._shown = time.monotonic()

    def __call__(self, told: dict[str, Any]) -> None:
        """Show a report with `bytes` and `total`, unless the last one was a moment ago."""
        now = time.monotonic()
        is_terminal = sys.stderr.isatty()
        pause_s = PROGRESS_TERMINAL_S if is_terminal else PROGRESS_LINES_S
        if now - self._begun < PROGRESS_AFTER_S or now - self._shown < pause_s:
            return
        self._shown = now
        end = "\x1b[K\r" if is_terminal else "\n"
        sys.stderr.write(self._line(told, now - self._begun) + end)
        sys.stderr.flush()

    def _line(self, told: dict[str, Any], spent_s: float) -> str:
        done, total = told.get("bytes"), told.get("total")
        line = f"{self._what}: {show.size(done)}"
        if isinstance(total, int) and isinstance(done, int) and 0 < done <= total:
            left_s = spent_s * (total - done) / done
            line += f" of {show.size(total)}, about {left_s:.0f} s left"
        for name in ("objects", "files"):
            if name in told:
                line += f", {told[name]} {name}"
        return line
