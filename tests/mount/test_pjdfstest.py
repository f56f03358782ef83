"""A POSIX test suite by others, in both zones of one mount."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import pjdfstest
from support.mounts import Mount, mounted

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

PASSED_MIN = 380


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    if reason := pjdfstest.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as scratch:
        root = Path(scratch)
        root.chmod(0o755)  # the suite acts as other users too; its sockets need short paths
        new = Mount(root / "store", root)
        new.run("init", new.store, "--state-dir", str(new.state))
        with mounted(new.store, root, "-o", "allow_other") as mount:
            yield mount


@pytest.mark.parametrize("zone", ["plugins", "workspace"])
def test_pjdfstest_finds_nothing(mount: Mount, tmp_path: Path, zone: str) -> None:
    folder = mount.path / zone / "s"
    folder.mkdir(parents=True)
    for part in (mount.path, folder.parent, folder):
        part.chmod(0o755)
    done = pjdfstest.run(folder, tmp_path)
    summary = re.search(r"(\d+) failed.*?(\d+) passed", done.stdout, re.S)
    assert summary, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert int(summary[1]) == 0, done.stdout
    assert int(summary[2]) >= PASSED_MIN, done.stdout[-500:]
    assert list(folder.iterdir()) == []
