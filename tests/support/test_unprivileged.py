"""The stand-in for an ordinary user mounts with FUSE, and changes nothing outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.unprivileged import Unprivileged

pytestmark = [pytest.mark.fuse, pytest.mark.net]

# An empty file system. The parent leaves when it is mounted, the child serves it.
EMPTY_FILE_SYSTEM = """
import os, stat, sys
import pyfuse3, trio

class Empty(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o755
        entry.st_uid = os.getuid()
        return entry

pyfuse3.init(Empty(), sys.argv[1], {"fsname=empty", "subtype=hpkfs-test"})
if os.fork():
    os._exit(0)
for fd in (0, 1, 2):
    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
try:
    trio.run(pyfuse3.main)
finally:
    pyfuse3.close(unmount=False)
"""


def test_an_ordinary_user_mounts_through_the_setuid_helper(unprivileged: Unprivileged) -> None:
    (unprivileged.home / "empty.py").write_text(EMPTY_FILE_SYSTEM, encoding="utf-8")
    mountpoint = unprivileged.home / "mnt"
    unprivileged.run("mkdir", "mnt")

    unprivileged.run("python", "empty.py", "mnt")

    mounts = unprivileged.run("cat", "/proc/self/mounts").stdout
    assert f"empty {mountpoint} fuse.hpkfs-test" in mounts
    assert unprivileged.run("stat", "-c", "%u", "mnt").stdout == "65534\n"
    assert str(mountpoint) not in Path("/proc/self/mounts").read_text(encoding="utf-8")
    unprivileged.run("fusermount3", "-u", "mnt")
    assert str(mountpoint) not in unprivileged.run("cat", "/proc/self/mounts").stdout


def test_the_user_is_nobody_and_finds_the_program_installed(unprivileged: Unprivileged) -> None:
    assert unprivileged.run("id", "-u").stdout == "65534\n"
    assert unprivileged.run("cat", "/etc/shadow", check=False).returncode != 0
    where = unprivileged.run("python", "-c", "import hpkfs; print(hpkfs.__file__)").stdout
    assert where.startswith(str(unprivileged.venv))
