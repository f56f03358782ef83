"""The one error tree of hpkfs.

Every failure that a person or a program may see is an `HpkfsError`: it carries the `errno`
that a call on the mount answers, the `exit_code` that a command ends with, and up to three
sentences: what happened, what was kept, what to do next.

    HpkfsError
    ├── UsageError            1  EINVAL    bad arguments, or a refused request
    │   └── BusyError         1  EBUSY     something else holds it; the holder is named
    ├── SavedLocallyError     2  EAGAIN    safe on this machine, not yet on the store
    │   └── TransientError    2  EIO       the store did not answer; retried by itself
    ├── ConflictError         3  EBUSY     the head moved elsewhere
    ├── AuthorisationError    4  EACCES    the store refuses this machine
    ├── QuotaError            5  ENOSPC    the store, or this disk, is full
    └── IntegrityError        6  EIO       bytes or documents are not what their digest says
        ├── FormatError       6  EIO       a document breaks the storage format
        ├── MissingObjectError 6 EIO       the store lacks an object that a snapshot names
        ├── JournalError      6  EIO       the journal is damaged, or newer than this program
        └── RuntimeMismatchError 6 EIO     a database of another schema, another runtime
"""

from __future__ import annotations

import errno
from typing import ClassVar


class HpkfsError(Exception):
    """Base of all failures of hpkfs.

    Args:
        happened: what happened, a whole sentence.
        kept: what is safe, a whole sentence; empty where nothing was at stake.
        next_step: what the person can do, a whole sentence; empty where nothing is needed.
    """

    errno: ClassVar[int] = errno.EIO
    exit_code: ClassVar[int] = 1

    def __init__(self, happened: str, *, kept: str = "", next_step: str = "") -> None:
        super().__init__(happened)
        self.happened = happened
        self.kept = kept
        self.next_step = next_step

    def __str__(self) -> str:
        return " ".join(part for part in (self.happened, self.kept, self.next_step) if part)


class UsageError(HpkfsError):
    """The arguments are wrong, or the request is refused."""

    errno = errno.EINVAL
    exit_code = 1


class BusyError(UsageError):
    """Something else holds what is needed; the message names the holder."""

    errno = errno.EBUSY


class SavedLocallyError(HpkfsError):
    """The work is safe on this machine and not yet on the store."""

    errno = errno.EAGAIN
    exit_code = 2


class TransientError(SavedLocallyError):
    """The store did not answer, or not in time; the same request may succeed later."""

    errno = errno.EIO


class ConflictError(HpkfsError):
    """The head of the store is not the parent of our checkpoint."""

    errno = errno.EBUSY
    exit_code = 3


class AuthorisationError(HpkfsError):
    """The store refuses this machine or this user."""

    errno = errno.EACCES
    exit_code = 4


class QuotaError(HpkfsError):
    """No space is left on the store or on the disk of the state directory."""

    errno = errno.ENOSPC
    exit_code = 5


class IntegrityError(HpkfsError):
    """Bytes are not what their digest or their document says."""

    exit_code = 6


class FormatError(IntegrityError):
    """A document breaks the storage format."""


class MissingObjectError(IntegrityError):
    """The store lacks something that a document names."""


class JournalError(IntegrityError):
    """The journal is damaged, or was written by a newer version."""


class RuntimeMismatchError(IntegrityError):
    """A database of another schema, or a runtime of another version."""
