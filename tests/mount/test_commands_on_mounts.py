"""Commands on real mounts: which mount is meant, and what a command says of it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from support.mounts import Mount, mounted, tree
from support.stores import make_store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fuse

USER, GROUP = 1_234, 55


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(str(tmp_path / "store"), seed=9, files=4, checkpoints=1, big_files=0)
    return tmp_path / "store"


@pytest.mark.parametrize("command", ["status", "fetch", "evict"])
def test_regression_a_path_that_is_not_there_is_named_and_no_bug(
    command: str, store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        done = mount.run(command, str(mount.path), "nowhere", check=1)
        assert "nowhere: No such file or directory." in done.stderr
        assert "Traceback" not in (mount.state / "hpkfs" / "daemon.log").read_text()


def test_evict_counts_what_it_freed(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        mount.run("fetch", str(mount.path), "--all")
        first = json.loads(mount.run("evict", str(mount.path), "--json").stdout)
        again = json.loads(mount.run("evict", str(mount.path), "--json").stdout)
        assert first["files"] > 0
        assert again == {"files": 0, "bytes": 0}


def test_regression_a_named_state_directory_is_not_answered_for_by_another_mount(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path, name="one") as one:
        with mounted(store, tmp_path, name="two") as two:
            (two.path / "SOUL.md").write_text("changed elsewhere")
            two.umount("--no-publish", check=2)
        for command in ("status", "sync"):
            args = [command, str(store), "--state-dir", str(two.state), "--json"]
            told = json.loads(one.run(*args, check=None).stdout)
            assert told.get("state_dir", str(two.state)) == str(two.state)
            assert told["state"] == ("pending" if command == "status" else "clean")


def test_regression_a_read_only_mount_shows_the_owner_and_modes_of_its_options(
    store: Path, tmp_path: Path
) -> None:
    options = f"ro,uid={USER},gid={GROUP},umask=077"
    with mounted(store, tmp_path, "-o", options) as mount:
        for name in os.listdir(mount.path):
            found = (mount.path / name).stat()
            assert (found.st_uid, found.st_gid) == (USER, GROUP)
            assert not found.st_mode & 0o077


def test_regression_a_read_only_mount_says_nothing_of_what_it_does_not_know(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path, "--read-only") as mount:
        for extra in (["SOUL.md"], ["--what-travels"], ["--metrics"]):
            done = mount.run("status", str(mount.path), *extra, check=1)
            assert "is a read-only mount" in done.stderr
            assert done.stdout == ""
        assert "on the store" not in mount.run("sync", str(mount.path)).stdout
        assert mount.umount().stdout == f"Unmounted {mount.path}.\n"


def test_regression_restoring_one_file_counts_one_file(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        rows = json.loads(mount.run("history", str(mount.path), "--json").stdout)["checkpoints"]
        (mount.path / "SOUL.md").write_text("changed")
        mount.run("sync", str(mount.path))
        args = ["restore", str(mount.path), rows[0]["snapshot_id"], "SOUL.md", "--json"]
        done = json.loads(mount.run(*args).stdout)
        assert (done["restored"], done["removed"]) == (1, 0)


def test_regression_a_store_is_not_adopted_as_a_home(store: Path, tmp_path: Path) -> None:
    mount = Mount(store, tmp_path)
    before = tree(store)
    assert "is a store and no agent's home" in mount.run("adopt", str(store), check=1).stderr
    assert tree(store) == before


def test_regression_a_history_whose_newest_checkpoint_is_missing_is_no_empty_one(
    store: Path, tmp_path: Path
) -> None:
    for file in (store / "snapshots").iterdir():
        file.unlink()
    mount = Mount(store, tmp_path)
    assert "is not in the store" in mount.run("history", str(store), check=6).stderr


def test_regression_what_stays_is_named_before_the_next_seal_and_never_said_to_travel(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "workspace" / "key").write_text(
            "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"
        )
        mount.run("sync", str(mount.path))
        (mount.path / "workspace" / ".netrc").write_text("secret")
        kept = {one["path"] for one in mount.status()["kept_local"]}
        assert {"workspace/key", "workspace/.netrc"} <= kept
        told = mount.status("--what-travels")
        assert kept == {one["path"] for one in told["kept_local"]}
        assert not kept & {one["path"] for one in told["files"]}
        (mount.path / "workspace" / "key").unlink()
        assert "workspace/key" not in {one["path"] for one in mount.status()["kept_local"]}
