"""How a mount ends, and begins again: nothing written is lost by any of the ways."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest
import trio
from support.faults import contents, opened
from support.mounts import Mount, mounted, wait_gone
from support.stores import make_store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.fuse


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(str(tmp_path / "store"), seed=5, files=4, checkpoints=1, big_files=0)
    return tmp_path / "store"


def on_the_store(store: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a machine finds that has never seen the agent."""
    fresh = tmp_path / f"fresh-{time.monotonic_ns()}"

    async def look() -> dict[str, bytes]:
        async with opened(store, fresh) as desk:
            return await contents(desk)

    return trio.run(look)


@contextlib.contextmanager
def holder(*command: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that says a line when it holds something, and goes on holding it."""
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def holds_a_file(path: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return holder("sh", "-c", 'exec 9<"$0"; echo holds; exec sleep 60', str(path))


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that is still open when its mount goes: then its close fails, too."""
    out = path.open("wb", buffering=0)
    try:
        yield out
    finally:
        with contextlib.suppress(OSError):
            out.close()


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stderr.startswith("hpkfs: "), done.stderr
    return done.stderr


# -- busy ---------------------------------------------------------------------------------------


def test_umount_of_a_busy_mount_names_the_process_and_changes_nothing(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "workspace" / "held.txt").write_text("held")
        with holds_a_file(mount.path / "workspace" / "held.txt") as process:
            said = error_of(mount.umount(check=1))
            assert f"process {process.pid} (sleep)" in said
            assert "held.txt" in said
            assert "stays mounted" in said
            assert "--force" in said
            assert (mount.path / "workspace" / "held.txt").read_text() == "held"
        mount.umount()
    assert on_the_store(store, tmp_path)["workspace/held.txt"] == b"held"


def test_a_shell_that_stands_in_the_mount_makes_it_busy(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        folder = mount.path / "workspace"
        with holder("sh", "-c", "echo holds; exec sleep 60", cwd=folder) as process:
            assert f"process {process.pid}" in error_of(mount.umount(check=1))
        mount.umount()


def test_force_saves_what_was_written_and_detaches_a_busy_mount(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        pid = mount.pid()
        with open_file(mount.path / "workspace" / "open.txt") as out:
            out.write(b"written before the end")
            done = mount.umount("--force")
            assert "Everything is on the store" in done.stdout
            assert not mount.is_mounted()
            wait_gone(pid)
            with pytest.raises(OSError, match="not connected"):
                out.write(b"written after the end")
    assert on_the_store(store, tmp_path)["workspace/open.txt"] == b"written before the end"


def test_force_on_a_mount_that_nobody_uses_is_an_ordinary_unmount(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "SOUL.md").write_text("soul")
        mount.umount("--force")
        assert not mount.is_mounted()
    assert on_the_store(store, tmp_path)["SOUL.md"] == b"soul"


# -- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_right_after_writes_saves_and_publishes_them(
    store: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with mounted(store, tmp_path) as mount:
        for index in range(20):
            (mount.path / "workspace" / f"{index}.txt").write_text(f"file {index}")
        pid = mount.pid()
        os.kill(pid, number)
        wait_gone(pid)
        assert not mount.is_mounted()
    found = on_the_store(store, tmp_path)
    assert {f"workspace/{i}.txt": f"file {i}".encode() for i in range(20)}.items() <= found.items()


def test_sigterm_with_an_open_file_saves_publishes_and_detaches(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        pid = mount.pid()
        with open_file(mount.path / "workspace" / "open.txt") as out:
            out.write(b"first")
            os.kill(pid, signal.SIGTERM)
            out.write(b", second")
            wait_gone(pid)
            assert not mount.is_mounted()
    found = on_the_store(store, tmp_path)
    assert found["workspace/open.txt"] == b"first, second"
    log = (mount.state / "hpkfs" / "daemon.log").read_text()
    assert "Traceback" not in log
    assert "still busy" in log


def test_a_file_that_is_closed_within_the_patience_lets_sigterm_unmount(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        pid = mount.pid()
        with open_file(mount.path / "workspace" / "open.txt") as out:
            os.kill(pid, signal.SIGTERM)
            out.write(b"closed soon")
        wait_gone(pid)
    assert on_the_store(store, tmp_path)["workspace/open.txt"] == b"closed soon"
    assert "still busy" not in (mount.state / "hpkfs" / "daemon.log").read_text()


def test_a_second_signal_hurries_and_loses_nothing(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        pid = mount.pid()
        with open_file(mount.path / "workspace" / "open.txt") as out:
            out.write(b"kept")
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
        assert "Traceback" not in (mount.state / "hpkfs" / "daemon.log").read_text()
        mount.mount()
        assert (mount.path / "workspace" / "open.txt").read_bytes() == b"kept"
        mount.umount("--wait")
    assert on_the_store(store, tmp_path)["workspace/open.txt"] == b"kept"


def test_regression_a_signal_and_a_bare_unmount_at_once_do_not_break_the_way_down(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        pid = mount.pid()
        with open_file(mount.path / "workspace" / "open.txt") as out:
            out.write(b"kept")
            os.kill(pid, signal.SIGTERM)
            # The daemon sees a busy mount first; then someone else takes it away.
            subprocess.run(["fusermount3", "-uz", mount.path], check=True, timeout=20)
        wait_gone(pid)
        log = (mount.state / "hpkfs" / "daemon.log").read_text()
        assert "Traceback" not in log
        assert "CRITICAL" not in log
    assert on_the_store(store, tmp_path)["workspace/open.txt"] == b"kept"


# -- other ways down ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-u", "-uz"])
def test_after_a_bare_fusermount_the_daemon_seals_publishes_and_ends(
    store: Path, tmp_path: Path, option: str
) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "workspace" / "bare.txt").write_text("bare")
        pid = mount.pid()
        subprocess.run(["fusermount3", option, mount.path], check=True, timeout=20)
        wait_gone(pid)
        assert sorted(os.listdir(mount.path)) == ["NOT-MOUNTED.txt", "cron"]
    assert on_the_store(store, tmp_path)["workspace/bare.txt"] == b"bare"
    assert "Traceback" not in (mount.state / "hpkfs" / "daemon.log").read_text()


def test_no_publish_ends_with_2_and_the_next_mount_sends_it(store: Path, tmp_path: Path) -> None:
    head = (store / "head.json").read_bytes()
    with mounted(store, tmp_path) as mount:
        (mount.path / "workspace" / "later.txt").write_text("later")
        done = mount.umount("--no-publish", "--json", check=2)
        told = json.loads(done.stdout)
        assert (told["state"], told["pending"]) == ("pending", 1)
        assert (store / "head.json").read_bytes() == head
        mount.mount()
        assert (mount.path / "workspace" / "later.txt").read_text() == "later"
        assert mount.run("sync", str(mount.path)).returncode == 0
        assert mount.status()["state"] == "clean"
        assert (store / "head.json").read_bytes() != head
        mount.umount()
    assert on_the_store(store, tmp_path)["workspace/later.txt"] == b"later"


def test_an_umount_without_changes_makes_no_checkpoint(store: Path, tmp_path: Path) -> None:
    head = (store / "head.json").read_bytes()
    with mounted(store, tmp_path) as mount:
        assert (mount.path / "SOUL.md").read_bytes()
        mount.umount()
    assert (store / "head.json").read_bytes() == head


# -- offline ------------------------------------------------------------------------------------


def test_a_mount_without_its_store_works_and_sends_everything_when_it_is_back(
    store: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    with mounted(store, tmp_path) as mount:
        mount.run("fetch", str(mount.path), "--all")
        before = contents_of(mount.path)
        mount.umount()
        store.rename(away)
        mount.mount()
        assert contents_of(mount.path) == before
        (mount.path / "workspace" / "offline.txt").write_text("made offline")
        told = json.loads(mount.umount("--json", check=2).stdout)
        assert told["pending"] == 1
        away.rename(store)
        mount.mount()
        mount.umount("--wait")
    assert on_the_store(store, tmp_path)["workspace/offline.txt"] == b"made offline"


def test_an_offline_mount_asks_nothing_of_the_store(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        mount.umount()
        head = (store / "head.json").read_bytes()
        mount.mount("--offline")
        (mount.path / "SOUL.md").write_text("offline soul")
        status = mount.status()
        assert status["state"] == "dirty"
        mount.umount(check=2)
        assert (store / "head.json").read_bytes() == head


def test_a_first_mount_offline_is_refused_with_the_way_out(store: Path, tmp_path: Path) -> None:
    mount = Mount(store, tmp_path)
    said = error_of(mount.mount("--offline", check=1))
    assert "Nothing of this agent is on this machine yet" in said
    assert "without --offline" in said
    assert not mount.is_mounted()
    assert os.listdir(mount.path) == []


def test_a_first_mount_without_its_store_is_refused_and_makes_no_agent(tmp_path: Path) -> None:
    mount = Mount(tmp_path / "nowhere", tmp_path)
    said = error_of(mount.mount(check=1))
    assert "nowhere" in said
    assert "Nothing of this agent is on this machine yet" in said
    mount.run("mount", mount.store, str(mount.path), check=1)
    assert (tmp_path / ".hermes-pubky" / "stores").is_dir()
    assert json.loads(mount.run("list", "--json").stdout) == {"mounts": [], "agents": []}
    assert not (tmp_path / "nowhere").exists()
    assert os.listdir(mount.path) == []


def contents_of(path: Path) -> dict[str, Any]:
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                found[str(file.relative_to(path))] = file.read_bytes()
    return found


# -- after a kill -------------------------------------------------------------------------------


def test_regression_a_mount_whose_daemon_was_killed_says_what_is_not_saved(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "workspace").mkdir(exist_ok=True)
        (mount.path / "workspace" / "unsaved.txt").write_text("unsaved")
        mount.kill()
        for _ in range(2):
            done = mount.run("status", str(mount.path), "--json", check=2)
            status = json.loads(done.stdout)
            assert (status["state"], status["state_dir"]) == ("dirty", str(mount.state))
            assert "workspace/unsaved.txt" in status["dirty"]
        done = mount.umount(check=2)
        assert "safe on this machine" in done.stdout
        assert not mount.is_mounted()
        mount.run("sync", str(store), "--state-dir", str(mount.state))
    assert on_the_store(store, tmp_path)["workspace/unsaved.txt"] == b"unsaved"


def test_sync_without_a_mount_sends_what_no_publish_left(store: Path, tmp_path: Path) -> None:
    with mounted(store, tmp_path) as mount:
        (mount.path / "SOUL.md").write_text("later")
        mount.umount("--no-publish", check=2)
        mount.run("status", str(store), "--state-dir", str(mount.state), check=2)
        mount.run("sync", str(store), "--state-dir", str(mount.state))
        mount.run("status", str(store), "--state-dir", str(mount.state))
    assert on_the_store(store, tmp_path)["SOUL.md"] == b"later"
