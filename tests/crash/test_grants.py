"""The file that holds a grant: private from its first moment, whole after a kill."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.faulty_disk import FaultyDisk

from hpkfs import grants
from hpkfs.durable import ATOMIC_CALLS
from hpkfs.errors import AuthorisationError, QuotaError

if TYPE_CHECKING:
    from pathlib import Path

GRANT = "v1:abc=:def"
STEPS = [f"{point}.{call}" for point in ("grant.file",) for call in ATOMIC_CALLS]


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "machine" / "state")


def names(state: str) -> list[str]:
    return os.listdir(state)


def test_a_grant_is_kept_for_this_user_alone(state: str) -> None:
    assert grants.read(state) is None
    old = os.umask(0)
    try:
        grants.keep(state, GRANT)
    finally:
        os.umask(old)
    assert grants.read(state) == GRANT
    assert stat.S_IMODE(os.stat(grants.path(state)).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(state).st_mode) == 0o700


def test_a_forgotten_grant_leaves_an_empty_file(state: str) -> None:
    grants.forget(state)
    assert not os.path.exists(grants.path(state))
    grants.keep(state, GRANT)
    grants.forget(state)
    assert grants.read(state) is None
    assert os.path.getsize(grants.path(state)) == 0


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("", None),
        ("# nothing\n\nOTHER=1\n", None),
        ("HERMES_PUBKY_GRANT_SECRET=\n", None),
        (f"A=1\n HERMES_PUBKY_GRANT_SECRET = '{GRANT}' \n", GRANT),
        (f'HERMES_PUBKY_GRANT_SECRET="{GRANT}"', GRANT),
        ("no equals sign", None),
    ],
)
def test_the_file_of_the_other_program_is_read(state: str, text: str, grant: str | None) -> None:
    grants.keep(state, "other")
    with open(grants.path(state), "w") as file:
        file.write(text)
    assert grants.read(state) == grant


@pytest.mark.parametrize(("what", "mode"), [("file", 0o640), ("file", 0o604), ("folder", 0o711)])
def test_a_grant_that_others_may_open_is_refused_with_the_remedy(
    state: str, what: str, mode: int
) -> None:
    grants.keep(state, GRANT)
    path = grants.path(state) if what == "file" else state
    os.chmod(path, mode)
    with pytest.raises(AuthorisationError) as caught:
        grants.read(state)
    assert f"chmod {'600' if what == 'file' else '700'} {path}" in caught.value.next_step
    assert GRANT not in str(caught.value)


def test_a_folder_that_others_may_enter_gets_no_grant(state: str) -> None:
    os.makedirs(state, mode=0o755)
    with pytest.raises(AuthorisationError, match="other users may open it"):
        grants.keep(state, GRANT)
    assert names(state) == []


def test_what_is_no_file_is_refused(state: str) -> None:
    grants.prepare(state)
    os.symlink("/etc/passwd", grants.path(state))
    with pytest.raises(AuthorisationError, match="cannot be used"):
        grants.read(state)


def test_a_fingerprint_tells_nothing_of_the_grant() -> None:
    assert grants.fingerprint(None) == "(none)"
    shown = grants.fingerprint(GRANT)
    assert len(shown) == 8
    assert shown not in GRANT


KILLED = """
import sys
from support.faulty_disk import KillingDisk
from hpkfs import grants
grants.keep(sys.argv[1], "v1:new", disk=KillingDisk(sys.argv[2]))
"""


@pytest.mark.parametrize("point", STEPS)
def test_a_kill_leaves_the_old_grant_or_the_new_one(state: str, point: str) -> None:
    grants.keep(state, GRANT)
    done = subprocess.run(
        (sys.executable, "-c", KILLED, state, point),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert grants.read(state) in {GRANT, "v1:new"}
    for name in names(state):
        assert stat.S_IMODE(os.stat(os.path.join(state, name)).st_mode) == 0o600
    grants.forget(state)
    assert names(state) == [grants.FILE]
    assert grants.read(state) is None


def test_a_full_disk_leaves_the_old_grant(state: str) -> None:
    grants.keep(state, GRANT)
    with pytest.raises(QuotaError):
        grants.keep(state, "v1:new", disk=FaultyDisk({"grant.file.write": errno.ENOSPC}))
    assert grants.read(state) == GRANT
    assert names(state) == [grants.FILE]
