"""The grant that this machine has for an agent: a file that only this user can read.

A grant is what the owner has approved once; whoever has its text can do what it allows. It lies
in the state directory, `credentials.env`, as the other v2 program has it, and goes to the Pubky
module and nowhere else: not into a log, an argument, or a child's environment.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from typing import Final

from hpkfs import places
from hpkfs.core.ids import sha256_hex
from hpkfs.durable import TEMPORARY_SUFFIX, Disk, RealDisk
from hpkfs.errors import AuthorisationError

FILE: Final = "credentials.env"
VARIABLE: Final = "HERMES_PUBKY_GRANT_SECRET"
BYTES_MAX: Final = 64 * 1024
FINGERPRINT_DIGITS: Final = 8


def path(state_dir: str) -> str:
    """Return where the grant of a state directory is, or would be."""
    return os.path.join(state_dir, FILE)


def prepare(state_dir: str) -> None:
    """Make the state directory one that may hold a grant.

    Raises:
        AuthorisationError: others may enter it.
    """
    places.make_private(state_dir)
    _check_private(state_dir, os.stat(state_dir), 0o700)


def read(state_dir: str) -> str | None:
    """Return the grant; None where this machine is not logged in.

    Raises:
        AuthorisationError: others may read or replace it, or it cannot be read.
    """
    try:
        fd = os.open(path(state_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path(state_dir), os.strerror(error.errno or errno.EIO)) from error
    with open(fd, "rb") as file:
        _check_private(path(state_dir), os.fstat(fd), 0o600)
        _check_private(state_dir, os.stat(state_dir), 0o700)
        text = file.read(BYTES_MAX).decode("utf-8", "replace")
    return _value(text)


def keep(state_dir: str, grant: str, *, disk: Disk | None = None) -> None:
    """Keep a grant in place of the one that is there; durable on return.

    Raises:
        AuthorisationError: others may enter the state directory.
        QuotaError: the disk is full; the old grant is still there.
    """
    assert grant.isprintable(), "checked when the session was opened"
    prepare(state_dir)
    _replace(state_dir, f"{VARIABLE}={grant}\n", disk)


def forget(state_dir: str, *, disk: Disk | None = None) -> None:
    """Drop the grant, if there is one; durable on return."""
    if os.path.lexists(path(state_dir)):
        _replace(state_dir, "", disk)


def fingerprint(grant: str | None) -> str:
    """Return what may be shown of a grant."""
    return "(none)" if grant is None else sha256_hex(grant.encode())[:FINGERPRINT_DIGITS]


def _replace(state_dir: str, text: str, disk: Disk | None) -> None:
    disk = RealDisk() if disk is None else disk
    disk.write_atomic(path(state_dir), text.encode(), mode=0o600, point="grant.file")
    for left in glob.glob(glob.escape(path(state_dir)) + f".*{TEMPORARY_SUFFIX}"):  # by a kill
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)


def _value(text: str) -> str | None:
    """The variable in `KEY=value` lines; blank ones and comments are skipped, quotes dropped."""
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == VARIABLE:
            return value.strip().strip("\"'") or None
    return None


def _check_private(what: str, found: os.stat_result, mode: int) -> None:
    if found.st_uid != os.geteuid():
        raise _unusable(what, "it belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise AuthorisationError(
            f"{what} holds a grant, and other users may open it"
            f" (mode {stat.S_IMODE(found.st_mode):o}).",
            kept="It was not used.",
            next_step=(
                f"Run `chmod {mode:o} {what}`. Where others may have read it already, run"
                " `hpkfs logout` and `hpkfs login` besides."
            ),
        )


def _unusable(what: str, why: str) -> AuthorisationError:
    return AuthorisationError(
        f"The grant in {what} cannot be used: {why}.",
        kept="Nothing was changed.",
        next_step="Mend or remove it, then run `hpkfs login`.",
    )
