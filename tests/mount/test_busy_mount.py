"""A program that never stops asking takes nothing from anyone else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.mounts import mounted
from support.stores import make_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.mounts import Mount

pytestmark = pytest.mark.fuse

HAMMER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("started", flush=True)
while True:
    os.pwrite(fd, b"x" * 512, 0)
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    make_store(str(tmp_path / "store"), seed=3, files=10)
    with mounted(tmp_path / "store", tmp_path) as made:
        yield made


def test_status_sync_and_other_programs_go_on_beside_one_that_never_stops(mount: Mount) -> None:
    with hammered(mount.path / "workspace" / "hammered"):
        assert mount.status()["state"] == "dirty"
        (mount.path / "workspace" / "other").write_text("mine\n")
        sealed = mount.run("sync", str(mount.path), check=None)
        assert "Checkpoint" in sealed.stdout
        assert (mount.path / "workspace" / "other").read_text() == "mine\n"


def test_a_mount_can_be_taken_from_a_program_that_never_stops(mount: Mount) -> None:
    with hammered(mount.path / "workspace" / "hammered"):
        mount.umount("--force", check=None)
        assert not mount.is_mounted()


@contextlib.contextmanager
def hammered(path: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", HAMMER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()
