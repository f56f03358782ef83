"""An agent on a real homeserver, from the login to the logout, as a person has it."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest
from support.machines import Machine
from support.mounts import tree

if TYPE_CHECKING:
    from pathlib import Path

    from support.homeserver import Testnet, User

pytestmark = [pytest.mark.pubky, pytest.mark.fuse]


@pytest.fixture
def user(testnet: Testnet) -> User:
    return testnet.new_user()


def test_an_agent_lives_on_a_homeserver(user: User, tmp_path: Path) -> None:
    first = Machine(user, tmp_path, name="first")
    second = Machine(user, tmp_path, name="second")
    try:
        first.run("init", first.store, "--state-dir", str(first.state), check=4)
        code, printed = first.login()
        assert code == 0, printed
        assert first.grant() not in printed
        assert stat.S_IMODE(first.grant_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(first.state.stat().st_mode) == 0o700
        first.init()
        first.mount()
        (first.path / "SOUL.md").write_text("You answer in one sentence.\n")
        (first.path / "workspace" / "naïve – 文件.txt").write_text("beyond ASCII\n")
        (first.path / "workspace" / "big.bin").write_bytes(os.urandom(9_000_000))
        first.run("sync", str(first.path))
        assert first.status()["state"] == "clean"

        second.mount(check=4)
        assert second.login()[0] == 0
        second.mount()
        assert tree(second.path / "workspace") == tree(first.path / "workspace")
        assert (second.path / "SOUL.md").read_text() == "You answer in one sentence.\n"
        second.run("umount", str(second.path))

        rows = first.told("history", check=0)["checkpoints"]
        assert len(rows) == 2
        oldest = rows[-1]["snapshot_id"]
        first.run("restore", str(first.path), oldest, "SOUL.md")
        assert "one sentence" not in (first.path / "SOUL.md").read_text()
        assert first.status()["state"] == "clean"
        first.run("fsck", str(first.path), "--read-data")
        first.umount()

        told = json.loads(
            first.run("logout", first.store, "--state-dir", str(first.state), "--json").stdout
        )
        assert told["revoked"] is True
        assert first.grant_file.read_text() == ""
        first.run("history", first.store, "--state-dir", str(first.state), "--json")
        first.run("sync", first.store, "--state-dir", str(first.state), check=4)
    finally:
        first.clean()
        second.clean()
