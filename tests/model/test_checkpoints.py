"""Checkpoints of one agent on several machines, without a kernel mount."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest
from support.agents import desk
from support.databases import add_message, add_session, make_hermes_database, open_database
from support.stores import make_store

from hpkfs import recovery
from hpkfs.core.documents import Reference
from hpkfs.core.paths import DATABASE, PORTABLE, SIDECAR, to_local
from hpkfs.core.portable import parse_portable
from hpkfs.errors import BusyError, ConflictError, UsageError
from hpkfs.restore import restore
from hpkfs.volume import Change

GENUINE = Path(__file__).parent.parent / "data" / "hermes-0.19"
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A copy of the genuine store."""
    shutil.copytree(GENUINE / "store", tmp_path / "store")
    return tmp_path / "store"


async def test_the_genuine_store_is_shown_file_by_file(store: Path, tmp_path: Path) -> None:
    expected = json.loads((GENUINE / "expected.json").read_text())["files"]
    async with desk(store, tmp_path / "a") as here:
        for logical, record in expected.items():
            local = to_local(logical)
            assert local is not None
            if logical == PORTABLE:
                continue
            data = await here.read(local)
            assert hashlib.sha256(data).hexdigest() == record["sha256"]
            assert bool(here.volume.resolve(local).mode & 0o100) == record["executable"]
        assert b"toolsets" in await here.read("config.yaml")
        assert here.agent.state() == ("clean", "")


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_store_that_nobody_designed_is_shown_and_carried(seed: int, tmp_path: Path) -> None:
    expected = make_store(str(tmp_path / "store"), seed=seed, files=60)
    newest = expected.newest
    async with desk(tmp_path / "store", tmp_path / "a") as here:
        for path, file in newest.visible.items():
            if path not in ("config.yaml", "state.db"):
                assert await here.read(path) == file.data, path
        await here.write("workspace/ours.txt", b"ours")
        result = await here.agent.sync()
        assert result["exit_code"] == 0
        base = here.agent.installer.base()
        assert base is not None
        untouched = {p: r for p, r in newest.snapshot.files.items() if p != SIDECAR}
        sealed = dict(base[0].files)
        del sealed["workspace/ours.txt"]
        sealed.pop(SIDECAR, None)
        assert sealed == untouched
    async with desk(tmp_path / "store", tmp_path / "b") as there:
        assert await there.read("workspace/ours.txt") == b"ours"


async def test_times_modes_links_and_empty_folders_travel(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        script = await here.write("workspace/run.sh", b"#!/bin/sh\n", mode=0o750)
        await here.volume.setattr(script.ino, Change(mtime_ns=1_234_567_890_123_456_789))
        here.link("workspace/latest", "run.sh")
        here.link("workspace/out", "/etc/passwd")
        here.folder("workspace/empty/inner")
        await here.agent.sync()
        assert "workspace/out" in here.kept()
        assert here.agent.state()[0] == "clean"
    async with desk(store, tmp_path / "b") as there:
        script = there.volume.resolve("workspace/run.sh")
        assert (stat.S_IMODE(script.mode), script.mtime_ns) == (0o750, 1_234_567_890_123_456_789)
        assert there.volume.resolve("workspace/latest").target == b"run.sh"
        assert there.volume.resolve("workspace/empty/inner").is_folder
        assert not there.exists("workspace/out")
        assert (await there.agent.sync())["sealed"] is None


async def test_the_first_machine_follows_the_second(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/old.txt", b"old")
        await here.agent.sync()
    async with desk(store, tmp_path / "b") as there:
        await there.write("workspace/new.txt", b"new")
        await there.write("SOUL.md", b"changed")
        there.remove("workspace/old.txt")
        there.rename("workspace/notes", "workspace/minutes")
        await there.agent.sync()
    async with desk(store, tmp_path / "a") as here:
        assert await here.read("workspace/new.txt") == b"new"
        assert await here.read("SOUL.md") == b"changed"
        assert not here.exists("workspace/old.txt")
        assert not here.exists("workspace/notes/plan.md")
        assert here.exists("workspace/minutes/plan.md")
        assert here.volume.journal.check() == []


async def test_a_head_that_moved_is_a_conflict_and_nothing_is_overwritten(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here, desk(store, tmp_path / "b") as there:
        await here.write("workspace/x.txt", b"here")
        await there.write("workspace/x.txt", b"there")
        await here.agent.sync()
        head = (store / "head.json").read_bytes()
        with pytest.raises(ConflictError) as caught:
            await there.agent.sync()
        assert caught.value.exit_code == 3
        assert (store / "head.json").read_bytes() == head
        assert str(tmp_path / "b") in caught.value.kept
        assert there.agent.state()[0] == "conflict"
        assert await there.read("workspace/x.txt") == b"there"
        with pytest.raises(ConflictError):
            await there.agent.sync()
    async with desk(store, tmp_path / "b") as there:  # work goes on until someone chooses
        assert there.agent.state()[0] == "conflict"
        assert await there.read("workspace/x.txt") == b"there"
    assert (store / "head.json").read_bytes() == head


async def test_a_head_that_replaced_ours_unknowingly_is_detected_and_nothing_is_overwritten(
    store: Path, tmp_path: Path
) -> None:
    before = (store / "head.json").read_bytes()
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/x.txt", b"here")
        await here.agent.sync()
        (store / "head.json").write_bytes(before)  # as a writer without locks sees it
        async with desk(store, tmp_path / "b") as there:
            await there.write("workspace/y.txt", b"there")
            await there.agent.sync()
        lost = (store / "head.json").read_bytes()
        with pytest.raises(ConflictError, match="without knowing of"):
            await here.agent.sync()
        assert here.agent.state()[0] == "conflict"
        assert await here.read("workspace/x.txt") == b"here"
    async with desk(store, tmp_path / "a") as here:  # and at every start
        assert here.agent.state()[0] == "conflict"
        assert await here.read("workspace/x.txt") == b"here"
        assert not here.exists("workspace/y.txt")
    assert (store / "head.json").read_bytes() == lost


async def test_a_head_that_another_machine_built_on_ours_is_no_lost_update(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/x.txt", b"here")
        await here.agent.sync()
        async with desk(store, tmp_path / "b") as there:
            for number in range(3):
                await there.write("workspace/y.txt", b"%d" % number)
                await there.agent.sync()
        assert (await here.agent.sync())["pulled"] is True
        assert await here.read("workspace/y.txt") == b"2"


async def test_what_cannot_travel_is_named_and_blocks_nothing(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/key.pem", KEY)
        await here.write("workspace/Case.txt", b"1")
        await here.write("workspace/case.txt", b"2")
        await here.write("workspace/e\u0301.txt", b"decomposed")
        await here.write("workspace/\u00e9.txt", b"composed")
        await here.write("workspace/ends with space ", b"x")
        await here.write("workspace/" + os.fsdecode(b"\xff"), b"x")
        big = await here.write("workspace/big.bin", b"x")
        await here.volume.setattr(big.ino, Change(size=(64 << 20) + 1))
        await here.write("workspace/.env", b"SECRET=1")
        await here.write("workspace/node_modules/a.js", b"x")
        await here.write("workspace/good.txt", b"good")
        await here.agent.sync()
        kept = here.kept()
        assert kept.keys() >= {
            "workspace/key.pem",
            "workspace/case.txt",
            "workspace/e\u0301.txt",
            "workspace/ends with space ",
            "workspace/\\xff",
            "workspace/big.bin",
            "workspace/.env",
            "workspace/node_modules",
        }
        paths = here.paths()
        assert {"workspace/good.txt", "workspace/Case.txt", "workspace/\u00e9.txt"} <= paths
        assert not any("key.pem" in path or "node_modules" in path for path in paths)
    stored = b"".join(file.read_bytes() for file in (store / "objects").iterdir())
    assert b"OPENSSH PRIVATE" not in stored
    assert b"SECRET=1" not in stored


async def test_a_file_that_stops_travelling_by_failure_keeps_its_record(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/README.md", KEY)
        await here.agent.sync()
        assert "workspace/README.md" in here.kept()
        assert "workspace/README.md" in here.paths()
    async with desk(store, tmp_path / "b") as there:
        assert b"PRIVATE" not in await there.read("workspace/README.md")
        await there.write("workspace/README.md", b"newer")
        await there.agent.sync()
    async with desk(store, tmp_path / "a") as here:
        assert await here.read("workspace/README.md") == KEY


async def test_what_the_user_ignores_leaves_the_next_checkpoint(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/.pubkyignore", b"README.md\nnotes/\n")
        await here.agent.sync()
        paths = here.paths()
        assert "workspace/README.md" not in paths
        assert not any(path.startswith("workspace/notes/") for path in paths)
        assert here.exists("workspace/README.md")
        await here.write("workspace/.pubkyignore", b"*.log\n")
        await here.write("workspace/more.txt", b"more")
        await here.agent.sync()
        assert "workspace/more.txt" in here.paths()
        assert "workspace/README.md" not in here.paths()


async def test_renames_between_the_zones_change_what_travels(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("notes.tmp", b"draft")
        here.rename("notes.tmp", "workspace/notes.txt")
        here.rename("workspace/README.md", "README.local")
        await here.agent.sync()
        assert "workspace/notes.txt" in here.paths()
        assert "workspace/README.md" not in here.paths()
        assert here.exists("README.local")


async def test_portable_settings_travel_and_the_rest_of_the_file_stays(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        text = (await here.read("config.yaml")).decode()
        text = text.replace("max_turns: 90", "max_turns: 42") + "mcp_servers: {x: {command: y}}\n"
        await here.write("config.yaml", text.encode())
        await here.agent.sync()
    async with desk(store, tmp_path / "b") as there:
        base = there.agent.installer.base_portable()
        assert base is not None
        assert base.max_turns == 42
        config = (await there.read("config.yaml")).decode()
        assert "max_turns: 42" in config
        assert "mcp_servers" not in config
        await there.write("config.yaml", b"agent:\n  max_turns: 100000\n# mine\n")
        await there.agent.sync()
        assert "config.yaml" in there.kept()
        record = there.agent.installer.base()
        assert record is not None
        piece = record[0].files[PORTABLE].pieces[0]
        assert parse_portable(await there.agent.objects.get(piece)).max_turns == 42


async def test_a_database_is_sealed_with_its_write_ahead_log(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "live.db"
    make_hermes_database(path, sessions=2, messages_per_session=3, workspace="/mnt/agent/workspace")
    live = open_database(path)
    live.execute("PRAGMA wal_autocheckpoint=0")
    add_session(live, "20260101_000000_abcdef", cwd="/mnt/agent/workspace/sub")
    add_message(live, "20260101_000000_abcdef", content="only in the log")
    live.commit()
    image, write_ahead_log = _image(path)
    async with desk(store, tmp_path / "a") as here:
        await here.write("state.db", image)
        await here.write("state.db-wal", write_ahead_log)
        result = await here.agent.sync()
        assert result["state"] == "clean"
    live.close()
    async with desk(store, tmp_path / "b") as there:
        copy = tmp_path / "copy.db"
        copy.write_bytes(await there.read("state.db"))
        with sqlite3.connect(copy) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            said = [row[0] for row in db.execute("SELECT content FROM messages")]
            assert "only in the log" in said
            found = {row[0] for row in db.execute("SELECT cwd FROM sessions")}
        assert "pubky-workspace:/sub" in found
        assert not any("/mnt/agent" in str(cwd) for cwd in found)
        assert not there.exists("state.db-wal")


async def test_any_database_is_sealed_with_its_log_and_without_its_sidecars(
    store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "live.db"
    live = sqlite3.connect(path, isolation_level=None)
    live.execute("PRAGMA journal_mode=WAL")
    live.execute("PRAGMA wal_autocheckpoint=0")
    live.execute("CREATE TABLE t(a)")
    live.execute("INSERT INTO t VALUES('in the log')")
    image, write_ahead_log = _image(path)
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/notes.db", image)
        await here.write("workspace/notes.db-wal", write_ahead_log)
        await here.write("workspace/notes.db-shm", b"shared memory")
        await here.write("workspace/plain-wal", b"no database beside it")
        assert (await here.agent.sync())["state"] == "clean"
        paths = here.paths()
        assert {"workspace/notes.db", "workspace/plain-wal"} <= paths
        assert not paths & {"workspace/notes.db-wal", "workspace/notes.db-shm"}
        assert (await here.agent.sync())["sealed"] is None
        await here.write("workspace/other.txt", b"x")
        await here.agent.sync()
        assert "workspace/notes.db" in here.paths()
        assert await here.read("workspace/notes.db-wal") == write_ahead_log
    async with desk(store, tmp_path / "b") as there:
        copy = tmp_path / "copy.db"
        copy.write_bytes(await there.read("workspace/notes.db"))
        assert not there.exists("workspace/notes.db-wal")
    live.close()
    with sqlite3.connect(copy) as db:
        assert db.execute("SELECT a FROM t").fetchall() == [("in the log",)]
    async with desk(store, tmp_path / "a") as here:
        await here.write("workspace/notes.db", path.read_bytes())
        here.remove("workspace/notes.db-wal")
        here.remove("workspace/notes.db-shm")
        assert (await here.agent.sync())["state"] == "clean"
        assert here.agent.path_status("workspace/notes.db")["sha256"] is not None


async def test_merely_opening_the_database_makes_no_checkpoint(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        data = bytearray(await here.read("state.db"))
        inode = here.volume.resolve("state.db")
        # The change counter and the version number, as a write that says nothing new leaves them.
        data[24:28] = (int.from_bytes(data[24:28]) + 1).to_bytes(4)
        data[92:96] = data[24:28]
        await here.volume.write(inode.ino, 0, bytes(data[:100]))
        assert here.agent.sealer.dirty_paths() == ["state.db"]
        result = await here.agent.sync()
        assert (result["sealed"], result["state"]) == (None, "clean")
        assert (await here.agent.sync())["sealed"] is None


@pytest.mark.expects_log("NOT saved")
async def test_a_database_that_cannot_be_captured_keeps_its_record_and_the_rest_is_saved(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        before = here.agent.installer.base()
        assert before is not None
        await here.write("state.db", b"SQLite format 3\0" + b"rubbish" * 1000)
        await here.write("workspace/rest.txt", b"rest")
        result = await here.agent.sync()
        assert (result["state"], result["exit_code"]) == ("corrupt", 6)
        assert "NOT saved" in str(result["detail"])
        after = here.agent.installer.base()
        assert after is not None
        assert after[0].files[DATABASE] == before[0].files[DATABASE]
        assert "workspace/rest.txt" in after[0].files


async def test_restoring_a_checkpoint_is_a_new_one_and_can_be_undone(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        first = here.agent.installer.base()
        assert first is not None
        soul = await here.read("SOUL.md")
        await here.write("SOUL.md", b"second")
        await here.write("workspace/added.txt", b"added")
        await here.agent.sync()
        second = here.agent.installer.base()
        assert second is not None
        newest = _reference(second)
        row = await here.agent.history.find(newest, first[0].snapshot_id, before_ns=None)
        result = await restore(here.agent, row, [])
        assert result["removed"] == 1  # the sidecar that described it is no file of the agent
        assert await here.read("SOUL.md") == soul
        assert not here.exists("workspace/added.txt")
        third = here.agent.installer.base()
        assert third is not None
        assert third[0].parent == newest
        row = await here.agent.history.find(
            _reference(third), second[0].snapshot_id, before_ns=None
        )
        await restore(here.agent, row, ["workspace/added.txt"])
        assert await here.read("workspace/added.txt") == b"added"
        assert await here.read("SOUL.md") == soul
        with pytest.raises(UsageError):
            await restore(here.agent, row, ["nowhere"])
        await here.agent.sync()
        assert here.agent.state()[0] == "clean"


async def test_restoring_refuses_while_the_database_is_open(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        base = here.agent.installer.base()
        assert base is not None
        chain = await here.agent.history.chain(_reference(base))
        inode = await here.volume.open(here.volume.resolve("state.db").ino, os.O_RDWR)
        with pytest.raises(BusyError):
            await restore(here.agent, chain.rows[-1], [])
        here.volume.release(inode.ino)
        await restore(here.agent, chain.rows[-1], [])
        assert here.volume.journal.check() == []


async def test_work_done_offline_is_kept_and_sent_later(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a"):
        pass
    async with desk(store, tmp_path / "a", offline=True) as here:
        await here.write("workspace/train.txt", b"on a train")
        result = await here.agent.sync()
        assert (result["state"], result["exit_code"], result["pending"]) == ("pending", 2, 1)
        await here.write("workspace/train.txt", b"still on a train")
        assert (await here.agent.sync())["pending"] == 2
    async with desk(store, tmp_path / "a") as here:
        result = await here.agent.sync()
        assert len(result["published"]) == 2  # type: ignore[arg-type]  # a list
        assert result["state"] == "clean"
    async with desk(store, tmp_path / "b") as there:
        assert await there.read("workspace/train.txt") == b"still on a train"


async def test_evicted_bytes_come_back(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        path = "workspace/data/sample.bin"
        before = await here.read(path)
        mtime = here.volume.resolve(path).mtime_ns
        freed = await here.agent.evict([path])
        assert freed == {"files": 1, "bytes": len(before)}
        assert here.agent.path_status(path)["state"] == "absent"
        assert await here.read(path) == before
        await here.volume.write(here.volume.resolve(path).ino, 1_048_570, b"across the edge")
        await here.agent.evict([path])
        after = await here.read(path)
        assert after[1_048_570:1_048_585] == b"across the edge"
        assert after[:1_048_570] == before[:1_048_570]
        assert here.volume.resolve(path).mtime_ns != mtime


def _image(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def _reference(base: object) -> Reference:
    snapshot, document = base  # type: ignore[misc]  # a pair
    return Reference(snapshot.snapshot_id, hashlib.sha256(document).hexdigest())  # type: ignore[arg-type,has-type]


async def test_a_new_top_level_name_is_told_once(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a") as here:
        await here.write("brainwaves.dat", b"local")
        await here.write("logs/agent.log", b"local")
        assert here.agent.tell_new_names() == ["brainwaves.dat"]
        assert here.agent.tell_new_names() == []
        assert here.agent.state()[0] == "clean"


async def test_a_backing_file_that_is_used_again_shows_nothing_of_before(
    store: Path, tmp_path: Path
) -> None:
    async with desk(store, tmp_path / "a") as here:
        for round_number in range(3):
            for number in range(20):
                await here.write(f"local-{number}", b"old bytes" * 100 * (round_number + 1))
            for number in range(20):
                here.volume.forget(here.volume.resolve(f"local-{number}").ino, 1)
                here.remove(f"local-{number}")
            here.volume.bury()
            recovery.remove_dropped(here.volume.journal, here.agent.content)
        spare = tmp_path / "a" / "hpkfs" / "backing.spare"
        assert len(os.listdir(spare)) == 20
        made = await here.write("fresh", b"")
        assert len(os.listdir(spare)) == 19
        assert (made.size, await here.read("fresh")) == (0, b"")
        before = made.mtime_ns
    async with desk(store, tmp_path / "a") as here:
        made = here.volume.resolve("fresh")
        assert (made.size, made.mtime_ns) == (0, before)
        assert os.listdir(spare) == []


async def test_clean_bytes_stay_within_the_cache_size(store: Path, tmp_path: Path) -> None:
    async with desk(store, tmp_path / "a", cache_bytes=400_000) as here:
        await here.read("workspace/data/sample.bin")
        await here.read("SOUL.md")
        here.agent.content.save_states()
        await here.agent.keep_bound()
        held = sum(
            here.agent.content.evictable_bytes(here.volume.resolve(path))
            for path in ("workspace/data/sample.bin", "SOUL.md", "state.db")
        )
        assert held <= 400_000
        assert here.volume.resolve("workspace/data/sample.bin").absent == 2
        assert not here.volume.resolve("SOUL.md").absent
