"""`status`, `sync` and `history` for an address, with no daemon."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from support.agents import desk
from support.stores import make_store

from hpkfs import offline, places
from hpkfs.core.documents import Head, encode_head, encode_snapshot, parse_head
from hpkfs.core.ids import SnapshotId, sha256_hex
from hpkfs.errors import BusyError, ConflictError, IntegrityError, TransientError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.stores import ExpectedStore

GENUINE = Path(__file__).parents[1] / "data" / "hermes-0.19" / "store"


@pytest.fixture
def store(tmp_path: Path) -> ExpectedStore:
    return make_store(str(tmp_path / "store"), seed=3, files=12, big_files=0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(places.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "home"


def write(store: ExpectedStore, state: Path, path: str, data: bytes, *, seal: bool = False) -> None:
    """Change a file as a daemon would that then ends without sealing, or without sending."""

    async def change() -> None:
        async with desk(store.root, state) as opened:
            await opened.write(path, data)
            if seal:
                await opened.agent.sync(pull=False, publish=False)

    trio.run(change)


def requests(uri: str, state: str | None) -> list[Callable[[], dict[str, object]]]:
    return [
        partial(offline.status, uri, state),
        partial(offline.sync, uri, state, wait=False),
        partial(offline.history, uri, state, limit=None),
    ]


def move_head(store: ExpectedStore) -> None:
    """Another machine goes back to the first checkpoint, under a new id."""
    other = SnapshotId("ab" * 16)
    document = encode_snapshot(
        replace(store.checkpoints[0].snapshot, snapshot_id=other, parent=store.newest.reference)
    )
    root = Path(store.root)
    (root / f"snapshots/{other}.json").write_bytes(document)
    head = Head("agent", store.agent_id, other, sha256_hex(document))
    (root / "head.json").write_bytes(encode_head(head))


# -- on a machine that never had the agent -------------------------------------------------


def test_status_of_a_store_never_mounted_tells_its_head_and_leaves_nothing(
    store: ExpectedStore, home: Path
) -> None:
    told = offline.status(store.uri, None)
    newest = store.newest.snapshot
    assert told["head"] == {"snapshot_id": newest.snapshot_id, "created_at": newest.created_at}
    assert (told["state"], told["exit_code"], told["base"]) == ("clean", 0, None)
    assert not home.exists()


def test_status_of_a_genuine_store_counts_its_files() -> None:
    told = offline.status(GENUINE.as_uri(), None)
    files, sizes = told["files"], told["bytes"]
    assert isinstance(files, dict)
    assert isinstance(sizes, dict)
    assert files["total"] == files["absent"] > 0
    assert sizes["total"] > 0 == sizes["hydrated"]


def test_history_of_a_store_never_mounted_is_the_whole_chain(
    store: ExpectedStore, home: Path
) -> None:
    told = offline.history(store.uri, None, limit=None)
    rows = told["checkpoints"]
    assert isinstance(rows, list)
    expected = [one.snapshot.snapshot_id for one in reversed(store.checkpoints)]
    assert [row["snapshot_id"] for row in rows] == expected
    assert told["unread"] == 0
    assert not home.exists()


def test_history_stops_at_its_limit(store: ExpectedStore) -> None:
    told = offline.history(store.uri, None, limit=2)
    rows = told["checkpoints"]
    assert isinstance(rows, list)
    assert len(rows) == 2
    assert told["unread"] is None


def test_sync_of_a_store_never_mounted_takes_its_files_over(
    store: ExpectedStore, tmp_path: Path
) -> None:
    told = offline.sync(store.uri, str(tmp_path / "state"), wait=False)
    assert (told["state"], told["exit_code"], told["sealed"]) == ("clean", 0, None)
    base = offline.status(store.uri, str(tmp_path / "state"))["base"]
    assert isinstance(base, dict)
    assert base["snapshot_id"] == store.newest.snapshot.snapshot_id


@pytest.mark.parametrize("exists", [True, False])
def test_an_address_without_an_agent_is_refused_and_leaves_nothing(
    tmp_path: Path, home: Path, exists: bool
) -> None:
    root = tmp_path / "nothing"
    if exists:
        root.mkdir()
    for ask in requests(str(root), None):
        with pytest.raises(UsageError, match="There is no agent in"):
            ask()
    assert not home.exists()
    assert root.exists() == exists


def test_an_address_of_one_checkpoint_is_refused(store: ExpectedStore) -> None:
    with pytest.raises(UsageError, match="names one checkpoint"):
        offline.status(f"{store.uri}@{'0' * 32}", None)


def test_a_damaged_head_is_an_integrity_error(store: ExpectedStore) -> None:
    Path(store.root, "head.json").write_bytes(b"{}\n")
    with pytest.raises(IntegrityError) as caught:
        offline.status(store.uri, None)
    assert caught.value.exit_code == 6


# -- with a state directory ----------------------------------------------------------------


def test_sync_seals_and_sends_what_a_daemon_left(store: ExpectedStore, tmp_path: Path) -> None:
    state = tmp_path / "state"
    write(store, state, "workspace/new.md", b"new")
    before = offline.status(store.uri, str(state))
    assert (before["state"], before["exit_code"], before["pid"]) == ("dirty", 2, None)
    told = offline.sync(store.uri, str(state), wait=False)
    assert (told["state"], told["published"]) == ("clean", [told["sealed"]])
    after = offline.status(store.uri, str(state))
    head = after["head"]
    assert isinstance(head, dict)
    assert head["snapshot_id"] == told["sealed"]
    assert after["exit_code"] == 0


def test_status_changes_nothing_on_the_store(store: ExpectedStore, tmp_path: Path) -> None:
    state = tmp_path / "state"
    write(store, state, "workspace/new.md", b"new")
    before = sorted(os.walk(store.root))
    head = Path(store.root, "head.json").read_bytes()
    offline.status(store.uri, str(state))
    assert sorted(os.walk(store.root)) == before
    assert Path(store.root, "head.json").read_bytes() == head


def test_a_pending_checkpoint_is_told_and_heads_the_history(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    write(store, state, "workspace/new.md", b"new", seal=True)
    told = offline.status(store.uri, str(state))
    assert (told["state"], told["exit_code"]) == ("pending", 2)
    head = told["head"]
    assert isinstance(head, dict)
    assert head["snapshot_id"] == store.newest.snapshot.snapshot_id
    rows = offline.history(store.uri, str(state), limit=None)["checkpoints"]
    assert isinstance(rows, list)
    assert [row["state"] for row in rows] == ["pending"] + ["published"] * len(store.checkpoints)


def test_the_head_in_status_is_that_of_the_store_after_the_history_was_read(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    offline.sync(store.uri, str(state), wait=False)
    offline.history(store.uri, str(state), limit=None)
    head = offline.status(store.uri, str(state))["head"]
    assert isinstance(head, dict)
    assert head["snapshot_id"] == store.newest.snapshot.snapshot_id


def test_a_store_that_is_away_is_offline_and_sync_keeps_the_work_here(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    offline.sync(store.uri, str(state), wait=False)
    shutil.move(store.root, store.root + ".away")
    told = offline.status(store.uri, str(state))
    assert (told["state"], told["exit_code"]) == ("offline", 0)
    assert "is not there" in str(told["last_error"])
    rows = offline.history(store.uri, str(state), limit=1)["checkpoints"]
    assert isinstance(rows, list)
    assert rows[0]["snapshot_id"] == store.newest.snapshot.snapshot_id
    with pytest.raises(TransientError) as caught:
        offline.sync(store.uri, str(state), wait=False)
    assert caught.value.exit_code == 2


def test_sync_that_waits_ends_when_the_store_is_back(
    store: ExpectedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    write(store, state, "workspace/new.md", b"new")
    shutil.move(store.root, store.root + ".away")

    async def bring_back(_seconds: float) -> None:
        shutil.move(store.root + ".away", store.root)

    monkeypatch.setattr(trio, "sleep", bring_back)
    told = offline.sync(store.uri, str(state), wait=True)
    assert told["state"] == "clean"
    head = parse_head(Path(store.root, "head.json").read_bytes())
    assert told["published"] == [head.snapshot_id]


def test_a_head_made_elsewhere_is_a_conflict_and_nothing_is_overwritten(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    write(store, state, "workspace/new.md", b"new", seal=True)
    move_head(store)
    head = Path(store.root, "head.json").read_bytes()
    told = offline.status(store.uri, str(state))
    assert (told["state"], told["exit_code"]) == ("conflict", 3)
    with pytest.raises(ConflictError):
        offline.sync(store.uri, str(state), wait=False)
    assert Path(store.root, "head.json").read_bytes() == head


def test_a_newer_head_is_taken_over_when_nothing_waits(
    store: ExpectedStore, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    offline.sync(store.uri, str(state), wait=False)
    move_head(store)
    told = offline.sync(store.uri, str(state), wait=False)
    assert (told["pulled"], told["state"]) == (True, "clean")


def test_a_state_directory_in_use_names_its_holder(store: ExpectedStore, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    offline.sync(store.uri, state, wait=False)
    with places.RunLock(state):
        for ask in requests(store.uri, state):
            with pytest.raises(BusyError, match=f"in use by process {os.getpid()}") as caught:
                ask()
            assert caught.value.exit_code == 1


def test_a_damaged_journal_is_an_integrity_error(store: ExpectedStore, tmp_path: Path) -> None:
    journal = tmp_path / "state" / "hpkfs" / "journal.sqlite3"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"garbage" * 1000)
    with pytest.raises(IntegrityError) as caught:
        offline.status(store.uri, str(tmp_path / "state"))
    assert caught.value.exit_code == 6
    assert journal.read_bytes() == b"garbage" * 1000
