"""Both v2 programs write to one store in turn, and each goes on where the other ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import hermes, peer
from support.mounts import Mount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fake_model import FakeModel

pytestmark = [pytest.mark.peer, pytest.mark.fuse]
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "hermes-0.19"
EXPECTED: dict[str, Any] = json.loads((SAMPLE / "expected.json").read_text())
BINARY = "workspace/data/sample.bin"
# Shown to people and the other program as our own: where attributes and the start profile are.
OURS = {"hpkfs/attributes.json", "hpkfs/start.json"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE / "store", tmp_path / "store"))


@pytest.fixture
def mount(store: Path, tmp_path: Path) -> Iterator[Mount]:
    """The sample's store, mounted."""
    made = Mount(store, tmp_path)
    try:
        made.mount()
        yield made
    finally:
        made.clean()


def newest_first(store: Path) -> tuple[str, ...]:
    """The chain of the store, by our own reading of it."""
    chain = []
    next_id: str | None = json.loads((store / "head.json").read_text())["snapshotId"]
    while next_id is not None:
        chain.append(next_id)
        snapshot = json.loads((store / "snapshots" / f"{next_id}.json").read_text())
        next_id = (snapshot["parent"] or {}).get("snapshotId")
    return tuple(chain)


@pytest.mark.hermes
@pytest.mark.slow
def test_the_other_program_accepts_what_hermes_did_on_our_mount(
    store: Path, mount: Mount, tmp_path: Path, model: FakeModel
) -> None:
    home = mount.path
    hermes.make_home(home, model.port)
    (home / "workspace" / "notes" / "ours.md").write_text("Ours.\n")
    (home / "workspace" / "data" / "sample.bin").unlink()
    (home / "workspace" / "empty").mkdir()
    (home / "workspace" / "link.md").symlink_to("notes/ours.md")
    (home / "workspace" / "src" / "count.py").chmod(0o755)
    run = hermes.run_query(home, hermes.WRITE_NOTE, cwd=home / "workspace")
    assert run.rc == 0
    mount.run("sync", str(home))
    (home / "SOUL.md").write_text("I am mounted.\n")
    mount.umount()

    report = peer.check(store, tmp_path / "scratch")

    assert report.problems == ()
    assert report.changes == ()
    assert set(report.foreign) <= OURS
    old = tuple(checkpoint["snapshotId"] for checkpoint in EXPECTED["checkpoints"])
    assert report.chain == newest_first(store)
    assert (report.chain[2:], len(report.chain)) == (old, len(old) + 2)
    assert BINARY not in report.files
    assert report.files["workspace/src/count.py"].executable
    assert (report.workspace / "notes" / "ours.md").read_text() == "Ours.\n"
    assert (report.workspace / "notes" / "note.md").read_text() == hermes.NOTE
    assert (report.home / "SOUL.md").read_text() == "I am mounted.\n"
    installed = {session.id: session for session in hermes.sessions(report.home)}
    assert {session["id"] for session in EXPECTED["database"]["sessionList"]} < set(installed)
    new = installed[run.session_id]
    assert new.messages[0] == ("user", hermes.WRITE_NOTE)
    assert new.cwd == str(report.workspace), "our marker became its workspace"


def test_what_the_other_program_publishes_on_top_of_ours_is_pulled_into_the_mount(
    store: Path, mount: Mount, tmp_path: Path
) -> None:
    home = mount.path
    (home / "workspace" / "ours.md").write_text("Ours.\n")
    (home / "workspace" / "ours.md").chmod(0o600)
    mount.run("sync", str(home))
    edits = {"workspace/theirs.md": "Theirs.\n", "profile/SOUL.md": "They.\n", BINARY: None}

    published = peer.publish(store, tmp_path / "first", edits)

    assert published.problems == ()
    mount.run("sync", str(home))
    assert (home / "workspace" / "theirs.md").read_text() == "Theirs.\n"
    assert (home / "workspace" / "ours.md").read_text() == "Ours.\n"
    assert (home / "workspace" / "ours.md").stat().st_mode & 0o777 == 0o600
    assert (home / "SOUL.md").read_text() == "They.\n"
    assert not (home / "workspace" / "data" / "sample.bin").exists()
    assert mount.status()["base"]["snapshot_id"] == published.published
    (home / "workspace" / "theirs.md").write_text("Ours now.\n")
    mount.umount()
    report = peer.check(store, tmp_path / "second")
    assert (report.problems, report.changes) == ((), ())
    assert report.chain[1:] == (published.published, *published.chain)


def test_a_change_of_both_is_a_conflict_that_names_the_other_and_loses_neither(
    store: Path, mount: Mount, tmp_path: Path
) -> None:
    home = mount.path
    published = peer.publish(store, tmp_path / "first", {"workspace/theirs.md": "Theirs.\n"})
    (home / "workspace" / "ours.md").write_text("Ours.\n")
    done = mount.run("sync", str(home), check=3)
    assert published.published[:8] in done.stderr
    assert (home / "workspace" / "ours.md").read_text() == "Ours.\n"
    assert newest_first(store)[0] == published.published
    mount.umount(check=3)
    assert peer.check(store, tmp_path / "second").problems == ()


def test_a_new_agent_of_ours_is_accepted(tmp_path: Path) -> None:
    store = tmp_path / "new"
    mount = Mount(store, tmp_path, name="new")
    mount.run("init", f"file://{store}", "--state-dir", str(mount.state))
    report = peer.check(store, tmp_path / "scratch")
    assert (report.problems, report.changes) == ((), ())
    assert (report.workspace / "AGENTS.md").exists()


@pytest.mark.hermes
@pytest.mark.slow
def test_an_imported_real_home_is_accepted(real_home: hermes.RealHome, tmp_path: Path) -> None:
    store = tmp_path / "new"
    mount = Mount(store, tmp_path, name="new")
    mount.run(
        "init", f"file://{store}", "--state-dir", str(mount.state),
        "--from-home", str(real_home.home), "--workspace", str(real_home.workspace),
    )  # fmt: skip
    report = peer.check(store, tmp_path / "scratch")
    assert (report.problems, report.changes) == ((), ())
    sessions = {session.id: session for session in hermes.sessions(report.home)}
    assert {s.id: s.messages for s in hermes.sessions(real_home.home)} == {
        id: session.messages for id, session in sessions.items()
    }
    assert {session.cwd for session in sessions.values()} == {str(report.workspace)}
