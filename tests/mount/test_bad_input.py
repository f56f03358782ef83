"""Whatever a store, a disk or a machine hands us: it is told in three sentences, nothing is lost.

Each test checks what is said, with which exit code or errno, that what was acknowledged is still
there, and that the rest goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from support.faults import contents, fill, opened, read_only, tiny_disk
from support.mounts import Mount, mounted
from support.stores import ExpectedStore, make_store

from hpkfs.core.documents import Head, encode_head, parse_head
from hpkfs.core.ids import SnapshotId, sha256_hex
from hpkfs.errors import (
    AuthorisationError,
    HpkfsError,
    IntegrityError,
    QuotaError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).resolve().parents[1] / "data" / "vectors"
NEGATIVE = json.loads((DATA / "08-negative.json").read_text())
MINIMAL_HEAD = parse_head((DATA / "02-minimal" / "head.json").read_bytes())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def expected(tmp_path: Path) -> ExpectedStore:
    return make_store(str(tmp_path / "store"), seed=3, files=6, checkpoints=2, big_files=0)


@pytest.fixture
def store(expected: ExpectedStore) -> Path:
    return Path(expected.root)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The sentences of a command that failed; never a traceback."""
    assert done.stderr.startswith("hpkfs: "), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def put(mount: Mount, name: str, data: str | bytes) -> None:
    """Write a file that travels."""
    (mount.path / "workspace").mkdir(exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    (mount.path / "workspace" / name).write_bytes(data)


def told(error: HpkfsError) -> None:
    assert error.happened
    assert error.kept, error.happened
    assert error.next_step, error.happened


def on_the_store(store: Path, state: Path) -> dict[str, bytes]:
    async def look() -> dict[str, bytes]:
        async with opened(store, state) as desk:
            return await contents(desk)

    return trio.run(look)


# -- objects that are not what they should be ---------------------------------------------------


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.fuse
@pytest.mark.parametrize(
    "spoil",
    [damage, lengthen, shorten, Path.unlink, replace_by_a_folder, replace_by_a_fifo],
    ids=lambda call: call.__name__,
)
def test_a_bad_object_is_an_error_of_its_file_alone(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    with mounted(made_here(tmp_path), tmp_path) as mount:
        for name in ("good", "bad"):
            put(mount, f"{name}.bin", name.encode() * 5_000)
        mount.umount()
    digest = hashlib.sha256(b"bad" * 5_000).hexdigest()
    spoil(next((tmp_path / "store" / "objects").glob(f"{digest}.*")))
    with mounted(tmp_path / "store", tmp_path, "--lazy", name="other") as mount:
        bad, good = (mount.path / "workspace" / f"{name}.bin" for name in ("bad", "good"))
        assert bad.stat().st_size == 15_000
        with pytest.raises(OSError, match="Input/output error"):
            bad.read_bytes()
        assert good.read_bytes() == b"good" * 5_000
        put(mount, "new.txt", "work goes on")
        mount.run("sync", str(mount.path))
        status = mount.status()
        assert digest in status["last_error"]
        bad.write_bytes(b"written anew")
        mount.run("sync", str(mount.path))
        mount.umount()
    found = on_the_store(tmp_path / "store", tmp_path / "third")
    assert found["workspace/bad.bin"] == b"written anew"
    assert found["workspace/new.txt"] == b"work goes on"


def made_here(tmp_path: Path) -> Path:
    make_store(str(tmp_path / "store"), seed=3, files=2, checkpoints=1, big_files=0)
    return tmp_path / "store"


async def test_regression_a_damaged_soul_does_not_keep_the_rest_of_the_agent_away(
    tmp_path: Path,
) -> None:
    store = made_here(tmp_path)
    async with opened(store, tmp_path / "one") as desk:
        await desk.write("SOUL.md", b"soul" * 1_000)
        await desk.write("workspace/good.txt", b"good")
        await desk.agent.sync()
    digest = hashlib.sha256(b"soul" * 1_000).hexdigest()
    damage(next((store / "objects").glob(f"{digest}.*")))
    async with opened(store, tmp_path / "two") as desk:
        assert digest in str(desk.agent.status()["last_error"])
        assert await desk.read("workspace/good.txt") == b"good"
        with pytest.raises(IntegrityError) as caught:
            await desk.read("SOUL.md")
        told(caught.value)
        await desk.write("workspace/new.txt", b"new")
        await desk.agent.sync()
        assert (await desk.write("SOUL.md", b"a new soul")).size == 10
        await desk.agent.sync()
    async with opened(store, tmp_path / "three") as desk:
        assert await desk.read("SOUL.md") == b"a new soul"
        assert await desk.read("workspace/new.txt") == b"new"


# -- heads and snapshots that cannot be trusted -------------------------------------------------


async def leave_work(store: Path, state: Path) -> None:
    """A machine that was used, and has something that is not on the store."""
    async with opened(store, state) as desk:
        await desk.write("workspace/mine.txt", b"not sent yet")


async def assert_refused_and_kept(
    store: Path, tmp_path: Path, kind: type[HpkfsError] = IntegrityError
) -> HpkfsError:
    """Neither a new machine nor one with work takes it; the work is reachable without the store."""
    with pytest.raises(kind) as caught:
        async with opened(store, tmp_path / "new"):
            pass
    told(caught.value)
    with pytest.raises(kind) as caught:
        async with opened(store, tmp_path / "used"):
            pass
    told(caught.value)
    async with opened(store, tmp_path / "used", offline=True) as desk:
        assert await desk.read("workspace/mine.txt") == b"not sent yet"
    return caught.value


async def test_a_snapshot_with_another_digest_is_refused(
    expected: ExpectedStore, store: Path, tmp_path: Path
) -> None:
    await leave_work(store, tmp_path / "used")
    newest = expected.newest.reference
    other = encode_head(Head("agent", "demo", newest.snapshot_id, sha256_hex(b"another")))
    (store / "head.json").write_bytes(other)
    with pytest.raises(IntegrityError) as caught:
        async with opened(store, tmp_path / "new"):
            pass
    error = caught.value
    told(error)
    assert newest.snapshot_id in error.happened


async def test_a_head_of_another_agent_is_refused(store: Path, tmp_path: Path) -> None:
    await leave_work(store, tmp_path / "used")
    head = parse_head((store / "head.json").read_bytes())
    (store / "head.json").write_bytes(
        encode_head(Head("agent", "somebody", head.snapshot_id, head.sha256))
    )
    error = await assert_refused_and_kept(store, tmp_path)
    assert "somebody" in str(error)


@pytest.mark.parametrize(
    "case", [c for c in NEGATIVE if c["parser"] == "head"], ids=lambda case: case["file"][9:-5]
)
async def test_a_hostile_head_is_refused(store: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    await leave_work(store, tmp_path / "used")
    (store / "head.json").write_bytes((DATA / case["file"]).read_bytes())
    await assert_refused_and_kept(store, tmp_path)


@pytest.mark.parametrize(
    "case", [c for c in NEGATIVE if c["parser"] == "snapshot"], ids=lambda case: case["file"][9:-5]
)
async def test_a_hostile_snapshot_is_refused(tmp_path: Path, case: dict[str, Any]) -> None:
    document = (DATA / case["file"]).read_bytes()
    store = tmp_path / "store"
    for folder in ("objects", "snapshots"):
        (store / folder).mkdir(parents=True)
    snapshot_id = SnapshotId(MINIMAL_HEAD.snapshot_id)
    (store / f"snapshots/{snapshot_id}.json").write_bytes(document)
    head = Head("agent", MINIMAL_HEAD.owner_id, snapshot_id, sha256_hex(document))
    (store / "head.json").write_bytes(encode_head(head))
    with pytest.raises(HpkfsError) as caught:
        async with opened(store, tmp_path / "state"):
            pass
    assert caught.value.exit_code == IntegrityError.exit_code
    told(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 4_096, b"{}", b"x" * 5_000, b"[" * 4_000])
async def test_rubbish_as_a_head_is_refused(store: Path, tmp_path: Path, content: bytes) -> None:
    await leave_work(store, tmp_path / "used")
    (store / "head.json").write_bytes(content)
    await assert_refused_and_kept(store, tmp_path)


@pytest.mark.fuse
def test_a_mount_of_a_store_that_cannot_be_trusted_ends_with_6_and_leaves_no_mount(
    store: Path, tmp_path: Path
) -> None:
    (store / "head.json").write_bytes(b"{}")
    mount = Mount(store, tmp_path)
    assert "The head" in said(mount.mount(check=6))
    assert not mount.is_mounted()
    assert os.listdir(mount.path) == []


# -- a store that goes away, refuses, or is full ------------------------------------------------


@pytest.mark.fuse
def test_a_store_that_vanishes_is_waited_for_and_gets_everything(
    store: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    with mounted(store, tmp_path) as mount:
        store.rename(away)
        put(mount, "while-away.txt", "kept")
        done = mount.run("sync", str(mount.path), check=2)
        assert str(store) in said(done)
        assert "safe on this machine" in done.stderr
        status = mount.status()
        assert status["state"] == "pending"
        assert status["pending"]["checkpoints"] == 1
        assert (mount.path / "workspace" / "while-away.txt").read_text() == "kept"
        put(mount, "while-away.txt", "kept, and changed")
        away.rename(store)
        mount.run("sync", str(mount.path))
        assert mount.status()["state"] == "clean"
        mount.umount()
    assert on_the_store(store, tmp_path / "x")["workspace/while-away.txt"] == b"kept, and changed"


@needs_root
async def test_a_store_that_turns_read_only_is_told_as_such_and_gets_everything_later(
    store: Path, tmp_path: Path
) -> None:
    async with opened(store, tmp_path / "state") as desk:
        await desk.write("workspace/a.txt", b"kept")
        with read_only(store):
            with pytest.raises(AuthorisationError) as caught:
                await desk.agent.sync()
            told(caught.value)
            assert "writable" in caught.value.next_step
            assert desk.agent.outcome()["exit_code"] == 4
            assert desk.agent.outcome()["pending"] == 1
            assert await desk.read("workspace/a.txt") == b"kept"
        await desk.agent.sync()
        assert desk.agent.outcome()["state"] == "clean"
    async with opened(store, tmp_path / "other") as desk:
        assert await desk.read("workspace/a.txt") == b"kept"


@needs_root
async def test_a_store_on_a_full_disk_gets_everything_when_there_is_space(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 2_048) as disk:
        make_store(str(disk / "store"), seed=3, files=3, checkpoints=1, big_files=0)
        data = os.urandom(200_000)
        async with opened(disk / "store", tmp_path / "state") as desk:
            await desk.write("workspace/a.bin", data)
            filler = fill(disk)
            for _ in range(2):
                with pytest.raises(QuotaError) as caught:
                    await desk.agent.sync()
                told(caught.value)
                assert desk.agent.outcome()["exit_code"] == 5
                assert desk.agent.outcome()["pending"] == 1
            await desk.write("workspace/b.txt", b"work goes on")
            filler.unlink()
            await desk.agent.sync()
            assert desk.agent.outcome()["state"] == "clean"
        async with opened(disk / "store", tmp_path / "other") as desk:
            assert await desk.read("workspace/a.bin") == data
            assert await desk.read("workspace/b.txt") == b"work goes on"


@needs_root
@pytest.mark.fuse
def test_a_full_store_ends_umount_with_5_and_names_what_waits(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 2_048) as disk:
        make_store(str(disk / "store"), seed=3, files=3, checkpoints=1, big_files=0)
        with mounted(disk / "store", tmp_path) as mount:
            filler = fill(disk)
            put(mount, "a.bin", os.urandom(100_000))
            done = mount.umount("--json", check=5)
            assert json.loads(done.stdout)["pending"] == 1
            filler.unlink()
            mount.mount()
            mount.umount("--wait")
        assert len(on_the_store(disk / "store", tmp_path / "o")["workspace/a.bin"]) == 100_000


def write_without_end(path: Path) -> None:
    with path.open("wb", buffering=0) as out:
        for _ in range(100):
            out.write(os.urandom(100_000))


def create_without_end(folder: Path) -> None:
    """Until the journal has no room, either."""
    for number in range(10_000):
        (folder / f"empty-{number}").touch()


# -- a full disk under the state directory ------------------------------------------------------


@needs_root
@pytest.mark.fuse
def test_a_full_state_disk_answers_enospc_and_loses_nothing(store: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "m-state", 8_192) as disk, mounted(store, tmp_path) as mount:
        kept = os.urandom(500_000)
        put(mount, "kept.bin", kept)
        filler = fill(disk)
        for name in ("workspace/big.bin", "logs.txt"):
            with pytest.raises(OSError, match="No space left"):
                write_without_end(mount.path / name)
        assert (mount.path / "workspace" / "kept.bin").read_bytes() == kept
        done = mount.run("sync", str(mount.path), check=5)
        assert "full" in said(done)
        assert "safe" in done.stderr
        assert mount.status()["state"] == "quota"
        filler.unlink()
        put(mount, "after.txt", "space again")
        mount.run("sync", str(mount.path))
        assert mount.status()["state"] == "clean"
        assert (mount.path / "workspace" / "kept.bin").read_bytes() == kept
        mount.umount()
        log = (mount.state / "hpkfs" / "daemon.log").read_text()
        assert "Traceback" not in log
    found = on_the_store(store, tmp_path / "other")
    assert found["workspace/kept.bin"] == kept
    assert found["workspace/after.txt"] == b"space again"


@needs_root
def test_regression_deleting_files_makes_room_on_a_full_disk(store: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "m-state", 24_576), mounted(store, tmp_path) as mount:
        (mount.path / "folder").mkdir()
        for name in ("workspace/one", "workspace/two", "logs"):
            with contextlib.suppress(OSError):
                write_without_end(mount.path / name)
        with pytest.raises(OSError, match="No space left"):
            create_without_end(mount.path)
        for name in ("workspace/one", "workspace/two", "logs"):
            (mount.path / name).unlink(missing_ok=True)
        (mount.path / "folder").rmdir()
        deadline = time.monotonic() + 20
        while os.statvfs(mount.path).f_bavail * 4_096 < 6 << 20:
            assert time.monotonic() < deadline, "the space of what was deleted stays taken"
            time.sleep(0.05)
        put(mount, "after.txt", "space again")
        mount.run("sync", str(mount.path))
        assert mount.status()["state"] == "clean"


@needs_root
async def test_a_full_state_disk_gives_way_by_evicting_what_is_on_the_store(
    store: Path, tmp_path: Path
) -> None:
    with tiny_disk(tmp_path / "state", 10_240) as disk:
        old = os.urandom(2 << 20)
        async with opened(store, disk) as desk:
            await desk.write("workspace/old.bin", old)
            new = await desk.write("workspace/new.bin", b"")
            await desk.agent.sync()
            fill(disk)
            data = os.urandom(1 << 20)
            assert await desk.volume.write(new.ino, 0, data) == len(data)
            assert await desk.read("workspace/new.bin") == data
            assert await desk.read("workspace/old.bin") == old


@needs_root
@pytest.mark.fuse
def test_a_mount_evicts_before_its_disk_is_full(store: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "m-state", 10_240) as disk, mounted(store, tmp_path) as mount:
        put(mount, "old.bin", os.urandom(2 << 20))
        mount.run("sync", str(mount.path))
        fill(disk)
        deadline = time.monotonic() + 20
        while mount.status("workspace/old.bin")["paths"][0]["state"] != "absent":
            assert time.monotonic() < deadline, "nothing was evicted"
        put(mount, "new.txt", "a name needs space, too")
        assert len((mount.path / "workspace" / "old.bin").read_bytes()) == 2 << 20
        mount.umount(check=None)


@needs_root
async def test_a_seal_on_a_full_disk_leaves_all_dirty_and_gives_its_space_back(
    store: Path, tmp_path: Path
) -> None:
    with tiny_disk(tmp_path / "state", 8_192) as disk:
        data = os.urandom(1 << 20)
        async with opened(store, disk) as desk:
            await desk.write("workspace/a.bin", data)
            filler = fill(disk)
            with filler.open("r+b") as out:
                out.truncate(filler.stat().st_size - 300_000)
            for _ in range(3):
                with pytest.raises(QuotaError) as caught:
                    await desk.agent.sync()
                told(caught.value)
                assert desk.agent.outcome()["state"] == "quota"
                left = [p for p in (disk / "hpkfs" / "pending").rglob("*") if p.is_file()]
                assert left == []
            filler.unlink()
            await desk.agent.sync()
            assert desk.agent.outcome()["state"] == "clean"
        async with opened(store, tmp_path / "other") as desk:
            assert await desk.read("workspace/a.bin") == data


@needs_root
@pytest.mark.fuse
def test_a_first_mount_on_a_full_disk_is_refused_in_a_sentence(store: Path, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "m-state", 256) as disk:
        filler = fill(disk)
        mount = Mount(store, tmp_path)
        done = mount.mount(check=5)
        assert "space" in said(done)
        assert os.listdir(mount.path) == []
        filler.unlink()


# -- the journal --------------------------------------------------------------------------------


def as_rubbish(path: Path) -> None:
    path.write_bytes(b"this is no database at all" * 500)


def as_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def with_a_hole(path: Path) -> None:
    with path.open("r+b") as out:
        for page in range(1, path.stat().st_size // 4_096):
            out.seek(page * 4_096)
            out.write(b"\xff" * 4_096)


def as_another_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebody(x)")
    db.close()


def newer(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()


@pytest.mark.fuse
@pytest.mark.parametrize(
    "spoil",
    [as_rubbish, as_half, with_a_hole, as_another_database, newer],
    ids=lambda call: call.__name__,
)
def test_a_journal_that_cannot_be_used_refuses_the_mount_and_is_not_touched(
    store: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    with mounted(store, tmp_path) as mount:
        put(mount, "mine.txt", "mine")
        mount.umount("--no-publish", check=2)
    journal = tmp_path / "m-state" / "hpkfs" / "journal.sqlite3"
    good = journal.read_bytes()
    spoil(journal)
    bad = journal.read_bytes()
    mount = Mount(store, tmp_path)
    assert str(journal) in said(mount.mount(check=6))
    assert not mount.is_mounted()
    assert journal.read_bytes() == bad
    journal.write_bytes(good)
    with mounted(store, tmp_path) as mount:
        assert (mount.path / "workspace" / "mine.txt").read_text() == "mine"
        mount.umount()


# -- one state directory, two daemons -----------------------------------------------------------


@pytest.mark.fuse
def test_a_second_daemon_on_one_state_directory_is_refused_and_names_the_first(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as first:
        second = Mount(store, tmp_path, name="second")
        second.state = first.state
        done = second.mount(check=1)
        assert str(first.path) in said(done) or str(first.pid()) in done.stderr
        assert not second.is_mounted()
        assert os.listdir(second.path) == []
        (first.path / "SOUL.md").write_text("still mine")
        first.umount()


@pytest.mark.fuse
def test_two_daemons_that_do_not_see_each_other_are_kept_apart_by_the_lock(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as first:
        second = Mount(store, tmp_path, name="second")
        second.state = first.state
        second.env["XDG_RUNTIME_DIR"] = str(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").mkdir()
        done = second.mount(check=1)
        assert f"process {first.pid()}" in said(done)
        assert os.listdir(second.path) == []
        first.umount()


# -- mountpoints --------------------------------------------------------------------------------


@pytest.mark.fuse
def test_a_missing_mountpoint_is_made_and_one_without_a_parent_is_refused(
    store: Path, tmp_path: Path
) -> None:
    mount = Mount(store, tmp_path)
    mount.path.rmdir()
    try:
        mount.mount()
        mount.umount()
    finally:
        mount.clean()
    mount.path = tmp_path / "no" / "parent"
    assert "mkdir -p" in said(mount.mount(check=1))


@pytest.mark.fuse
def test_a_mountpoint_that_holds_files_is_refused_with_the_way_to_take_them_over(
    store: Path, tmp_path: Path
) -> None:
    mount = Mount(store, tmp_path)
    (mount.path / "config.yaml").write_text("model: x\n")
    assert "hpkfs adopt" in said(mount.mount(check=1))
    assert (mount.path / "config.yaml").read_text() == "model: x\n"
    assert os.listdir(mount.path) == ["config.yaml"]


@pytest.mark.fuse
def test_a_file_as_mountpoint_is_refused(store: Path, tmp_path: Path) -> None:
    mount = Mount(store, tmp_path)
    mount.path = tmp_path / "file"
    mount.path.write_text("mine")
    assert "is not a directory" in said(mount.mount(check=1))
    assert mount.path.read_text() == "mine"


@pytest.mark.fuse
def test_a_dead_mount_is_cleared_by_the_next_mount_and_lost_nothing(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        put(mount, "a.txt", "written before the kill")
        mount.kill()
        with pytest.raises(OSError, match="not connected"):
            os.listdir(mount.path)
        mount.mount()
        assert (mount.path / "workspace" / "a.txt").read_text() == "written before the kill"
        mount.umount()
        assert not mount.is_mounted()


@pytest.mark.fuse
def test_a_second_mount_on_the_same_place_is_refused_and_names_what_is_there(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        assert "mounted on" in said(mount.mount(check=1))
        other = make_store(str(tmp_path / "store2"), seed=4, files=2, checkpoints=1)
        another = Mount(other.root, tmp_path)
        another.state = tmp_path / "state2"
        assert str(store) in said(another.mount(check=1))
        assert (mount.path / "SOUL.md").read_bytes()


@pytest.mark.fuse
def test_what_was_written_onto_the_bare_mountpoint_goes_to_recovery(
    store: Path, tmp_path: Path
) -> None:
    with mounted(store, tmp_path) as mount:
        mount.umount()
        assert sorted(os.listdir(mount.path)) == ["NOT-MOUNTED.txt", "cron"]
        (mount.path / "notes.txt").write_text("written beneath")
        done = mount.mount()
        assert "recovery" in done.stdout + done.stderr
        moved = list((mount.state / "hpkfs" / "recovery").rglob("notes.txt"))
        assert [path.read_text() for path in moved] == ["written beneath"]
        assert not (mount.path / "notes.txt").exists()


# -- a machine that cannot mount ----------------------------------------------------------------


def without(tmp_path: Path, *, device: bool, fusermount: bool) -> list[str]:
    """A command that runs another one in a namespace that lacks something."""
    (tmp_path / "empty").write_bytes(b"")
    script = "set -e\n"
    if not device:
        script += f"mount --bind {tmp_path}/empty /dev/fuse\n"
    if not fusermount:
        script += f"PATH={tmp_path}/bin\n"
    (tmp_path / "bin").mkdir(exist_ok=True)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script + 'exec "$@"', "x"]


def run_in(prefix: list[str], mount: Mount, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "hpkfs.cli", *args],
        env=mount.env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@needs_root
@pytest.mark.fuse
@pytest.mark.parametrize(
    ("lacks", "name", "word"),
    [("device", "device", "/dev/fuse"), ("fusermount", "fusermount3", "fusermount3 is missing")],
)
def test_what_the_machine_lacks_is_named_by_mount_and_by_doctor(
    store: Path, tmp_path: Path, lacks: str, name: str, word: str
) -> None:
    prefix = without(tmp_path, device=lacks != "device", fusermount=lacks != "fusermount")
    mount = Mount(store, tmp_path)
    done = run_in(prefix, mount, "mount", str(store), str(mount.path))
    assert done.returncode == 1
    assert word in said(done)
    assert "Nothing was changed." in done.stderr
    assert os.listdir(mount.path) == []
    done = run_in(prefix, mount, "doctor", "--json")
    assert done.returncode == 1
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert not findings[name]["ok"]
    assert findings[name]["remedy"]


# -- the head moved elsewhere -------------------------------------------------------------------


@pytest.mark.fuse
def test_two_machines_that_changed_the_same_file_keep_both_versions(
    store: Path, tmp_path: Path
) -> None:
    with (
        mounted(store, tmp_path, name="one") as one,
        mounted(store, tmp_path, name="two") as two,
    ):
        (two.path / "SOUL.md").write_text("of two")
        two.umount()
        theirs = parse_head((store / "head.json").read_bytes()).snapshot_id
        (one.path / "SOUL.md").write_text("of one")
        done = one.run("sync", str(one.path), check=3)
        text = said(done)
        status = one.status()
        assert status["state"] == "conflict"
        assert theirs in text
        assert status["base"]["snapshot_id"] in text
        assert parse_head((store / "head.json").read_bytes()).snapshot_id == theirs
        assert (one.path / "SOUL.md").read_text() == "of one"
        one.umount(check=3)
        one.mount(check=None)
        assert (one.path / "SOUL.md").read_text() == "of one"
    assert on_the_store(store, tmp_path / "third")["SOUL.md"] == b"of two"


async def test_a_publish_that_was_killed_before_it_was_noted_is_no_conflict_later(
    store: Path, tmp_path: Path
) -> None:
    """The head was moved, the daemon died; then another machine built on it."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with opened(store, state) as desk:
        await desk.write("workspace/a.txt", b"of one")
        await desk.agent.sync(publish=False)
        shutil.copytree(state, copy)
        await desk.agent.sync()
    async with opened(store, tmp_path / "two") as desk:
        await desk.write("workspace/b.txt", b"of two")
        await desk.agent.sync()
    async with opened(store, copy) as desk:
        await desk.agent.sync()
        assert desk.agent.outcome()["state"] == "clean"
        assert await desk.read("workspace/a.txt") == b"of one"
        assert await desk.read("workspace/b.txt") == b"of two"


# -- what this machine sealed, damaged before it was sent ---------------------------------------


@pytest.mark.expects_log("the sealed copy of .* was damaged")
@pytest.mark.parametrize("spoil", [damage, shorten], ids=lambda call: call.__name__)
async def test_regression_a_damaged_sealed_copy_is_made_again_from_the_tree(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    store = made_here(tmp_path)
    data = os.urandom((1 << 20) + 10)
    async with opened(store, tmp_path / "state") as desk:
        await desk.write("workspace/a.bin", data)
        await desk.write("workspace/b.txt", b"text")
        await desk.agent.sync(publish=False)
        for path in (tmp_path / "state" / "hpkfs" / "pending").glob("*/objects/*"):
            spoil(path)
        await desk.agent.sync()
        assert desk.agent.outcome()["state"] == "clean"
    async with opened(store, tmp_path / "other") as desk:
        assert await desk.read("workspace/a.bin") == data
        assert await desk.read("workspace/b.txt") == b"text"


async def test_regression_nothing_is_evicted_that_is_not_on_the_store_yet(
    store: Path, tmp_path: Path
) -> None:
    data = os.urandom((1 << 20) + 10)
    async with opened(store, tmp_path / "state") as desk:
        await desk.write("workspace/a.bin", data)
        await desk.agent.sync(publish=False)
        await desk.agent.evict([])
        assert desk.volume.resolve("workspace/a.bin").absent == 0
        await desk.agent.sync()
        await desk.agent.evict([])
        assert desk.volume.resolve("workspace/a.bin").absent == 2
        assert await desk.read("workspace/a.bin") == data


@pytest.mark.expects_log("the tree still had its bytes")
async def test_a_sealed_object_that_is_gone_is_never_named_by_a_published_checkpoint(
    tmp_path: Path,
) -> None:
    store = made_here(tmp_path)
    async with opened(store, tmp_path / "state") as desk:
        await desk.write("workspace/b.txt", b"text")
        await desk.agent.sync(publish=False)
        for path in (tmp_path / "state" / "hpkfs" / "pending").glob("*/objects/*"):
            path.unlink()
        with contextlib.suppress(IntegrityError):
            await desk.agent.sync()
    async with opened(store, tmp_path / "other") as desk:
        assert not desk.exists("workspace/b.txt") or await desk.read("workspace/b.txt") == b"text"
