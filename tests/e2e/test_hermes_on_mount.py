"""The main job: the real Hermes lives on a mount, is killed, moves to another machine.

Each question to Hermes takes about six seconds, so one day of an agent's life is lived once
and several tests look at what it left.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import hermes, mounts
from support.fake_model import Answer, Call, FakeModel
from support.machines import Machine
from support.mounts import Mount
from support.venvs import hermes_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fake_model import Request, Script
    from support.homeserver import Testnet

pytestmark = [pytest.mark.fuse, pytest.mark.hermes, pytest.mark.slow]

DATABASE = "conversations/state.sqlite3"
FACT = "Ada was born in December."
FAREWELL = hermes.SKILL.replace("greeting", "farewell").replace("morning", "night")
LIVE = "Live through this day."
SCRIPT: Script = {
    **hermes.SCRIPT,
    LIVE: (
        Answer(calls=(Call("memory", {"action": "add", "target": "user", "content": FACT}),)),
        Answer(
            calls=(
                Call("skill_manage", {"action": "create", "name": "farewell", "content": FAREWELL}),
            )
        ),
        Answer(
            calls=(
                Call("skill_view", {"name": "farewell"}),
                Call("write_file", {"path": "notes/day.md", "content": "It was a good day.\n"}),
            )
        ),
        Answer(
            calls=(
                Call("read_file", {"path": "notes/note.md"}),
                Call("terminal", {"command": "seq 4 > four.txt && pwd"}),
            )
        ),
        Answer("The day is over."),
    ),
}
SECOND_CONFIG = "# The second machine\n"
ERRORS = Path("logs/errors.log")
KILL_DELAY_S = 0.4
GATEWAY_END_S = 60
BACKGROUND_END_S = 60


# -- stores ----------------------------------------------------------------------------------


def newest(store: Path) -> dict[str, Any]:
    head = json.loads((store / "head.json").read_text())
    snapshot: dict[str, Any] = json.loads(
        (store / "snapshots" / f"{head['snapshotId']}.json").read_text()
    )
    return snapshot


def stored_bytes(store: Path, logical: str) -> bytes:
    """Put a file of the newest checkpoint together from its objects."""
    pieces = newest(store)["files"][logical]["pieces"]
    return b"".join((store / piece["object"]).read_bytes() for piece in pieces)


def sealed_sessions(store: Path, scratch: Path) -> list[hermes.Session]:
    """Check the newest checkpoint's database, and return its conversations."""
    scratch.mkdir()
    database = scratch / hermes.DATABASE
    database.write_bytes(stored_bytes(store, DATABASE))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    return hermes.sessions(scratch)


def messages(log: str) -> set[str]:
    """The lines of a log of Hermes, without times and sessions."""
    return {
        re.sub(r"^[-0-9]+ [:,0-9]+ (\w+) (\[\w+\] )?", r"\1 ", line) for line in log.splitlines()
    }


def texts(sessions: list[hermes.Session]) -> dict[str, tuple[tuple[str, str], ...]]:
    return {session.id: session.messages for session in sessions}


def all_bytes(store: Path) -> Iterator[tuple[str, bytes]]:
    for file in store.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(store)), file.read_bytes()


def committed(home: Path) -> set[tuple[str, str, str]]:
    """What another reader sees at this moment, through SQLite's own locks on the mount."""
    uri = f"file:{home / hermes.DATABASE}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=10)) as connection:
        rows = connection.execute("SELECT session_id, role, content FROM messages").fetchall()
    return {(session, role, content or "") for session, role, content in rows}


def rows_of(sessions: list[hermes.Session]) -> set[tuple[str, str, str]]:
    return {(s.id, role, text) for s in sessions for role, text in s.messages}


# -- one day ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Day:
    """What was seen while the agent lived a day on the mount."""

    source: hermes.RealHome
    store: Path
    mount: Mount  # the first machine's, unmounted
    made: dict[str, Any]
    imported_store: dict[str, bytes]
    imported_modes: dict[str, int]
    run: hermes.Run
    errors: tuple[str, str]  # before and after
    journal_mode: str
    tool_results: tuple[str, ...]
    umounted: dict[str, Any]


def use_model(home: Path, port: int) -> None:
    """Point the home's settings to the model's port, and keep everything else in them."""
    file = home / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    address = f"  base_url: http://127.0.0.1:{port}/v1\n"
    file.write_text("".join(address if "base_url:" in line else line for line in lines))


@pytest.fixture(scope="module", params=["folder", pytest.param("pubky", marks=pytest.mark.pubky)])
def day(
    request: pytest.FixtureRequest,
    real_home: hermes.RealHome,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Day]:
    root = tmp_path_factory.mktemp("day")
    if request.param == "folder":
        store = root / "store"
        mount = Mount(store, root, name="first")
    else:
        network: Testnet = request.getfixturevalue("network")
        user = network.new_user()
        store = network.agent_folder(user)
        mount = Machine(user, root, name="first").logged_in()
    try:
        with FakeModel(SCRIPT) as model:
            lived = live(real_home, store, mount, model)
        yield lived
    finally:
        mount.clean()


def live(source: hermes.RealHome, store: Path, mount: Mount, model: FakeModel) -> Day:
    made = json.loads(
        mount.run(
            "init", mount.store, "--json", "--state-dir", str(mount.state),
            "--from-home", str(source.home), "--workspace", str(source.workspace),
        ).stdout
    )  # fmt: skip
    imported = dict(all_bytes(store))
    mount.mount()
    home = mount.path
    modes = {
        str(path.relative_to(home)): stat.S_IMODE(path.lstat().st_mode) for path in home.rglob("*")
    }
    use_model(home, model.port)
    before = (home / ERRORS).read_text()
    run = hermes.run_query(home, LIVE, cwd=home / "workspace")
    with closing(sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True)) as connection:
        (journal_mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    after = (home / ERRORS).read_text()
    umounted = json.loads(umount_when_idle(mount, "--json").stdout)
    return Day(
        source=source,
        store=store,
        mount=mount,
        made=made,
        imported_store=imported,
        imported_modes=modes,
        run=run,
        errors=(before, after),
        journal_mode=journal_mode,
        tool_results=tuple(text for role, text in model.turns[-1].messages if role == "tool"),
        umounted=umounted,
    )


def test_what_travels_of_a_real_home_is_in_the_store(day: Day) -> None:
    assert day.made["exit_code"] == 0
    assert {
        "SOUL.md",
        "memories/USER.md",
        "skills/greeting/SKILL.md",
        "state.db",
        "workspace/AGENTS.md",
        "workspace/notes/note.md",
        "workspace/counted.txt",
    } <= set(day.made["travels"])
    assert not [path for path in day.made["travels"] if ".venv" in path or "plugins" in path]
    assert day.made["skipped"] == []


def test_no_secret_of_a_real_home_is_in_any_object_of_the_store(day: Day) -> None:
    secrets = [secret.encode() for secret in day.source.secrets]
    for name, data in [*day.imported_store.items(), *all_bytes(day.store)]:
        assert not [secret for secret in secrets if secret in data], name


def test_the_rest_of_a_real_home_is_on_the_mount_with_its_modes(day: Day) -> None:
    expected = {}
    for path in day.source.home.rglob("*"):
        name = str(path.relative_to(day.source.home))
        if not name.startswith("state.db"):  # its sidecars come and go
            expected[name] = stat.S_IMODE(path.lstat().st_mode)
    assert {name: day.imported_modes.get(name) for name in expected} == expected
    assert expected[".env"] == expected["auth.json"] == 0o600
    assert {"plugins/counter/turns", "cron/jobs.json", "hermes-agent/venv/lib64"} < set(expected)


def test_hermes_uses_its_memory_skills_files_and_terminal_on_the_mount(day: Day) -> None:
    assert (day.run.rc, day.run.stdout.splitlines()[-1]) == (0, "The day is over.")
    assert FACT in stored_bytes(day.store, "profile/memories/USER.md").decode()
    assert stored_bytes(day.store, "profile/skills/farewell/SKILL.md").decode() == FAREWELL
    assert stored_bytes(day.store, "workspace/notes/day.md") == b"It was a good day.\n"
    assert stored_bytes(day.store, "workspace/four.txt") == b"1\n2\n3\n4\n"
    assert len(day.tool_results) == 6
    assert "Say good night" in day.tool_results[2], "the new skill was viewed"
    assert hermes.NOTE.strip() in day.tool_results[4], "the imported note was read"
    assert str(day.mount.path / "workspace") in day.tool_results[5], "the terminal was there"


def test_hermes_reports_no_error_and_its_database_stays_in_wal_mode(day: Day) -> None:
    before, after = (messages(text) for text in day.errors)
    assert len(before) > 3, "a machine without a browser is complained of in every run"
    assert after <= before
    assert day.journal_mode == "wal"


def test_the_unmount_seals_a_sound_database_with_every_conversation(
    day: Day, tmp_path: Path
) -> None:
    assert (day.umounted["state"], day.umounted["exit_code"]) == ("clean", 0)
    sealed = texts(sealed_sessions(day.store, tmp_path / "sealed"))
    for session in hermes.sessions(day.source.home):
        assert sealed[session.id] == session.messages
    assert sealed[day.run.session_id][0] == ("user", LIVE)
    assert sealed[day.run.session_id][-1] == ("assistant", "The day is over.")


def test_a_session_of_the_imported_workspace_belongs_to_the_workspace_everywhere(
    day: Day, tmp_path: Path
) -> None:
    first = {session.id: session for session in hermes.sessions(day.source.home)}
    assert {s.cwd for s in first.values()} == {str(day.source.workspace)}
    folders = {s.cwd for s in sealed_sessions(day.store, tmp_path / "sealed")}
    assert folders == {"pubky-workspace:/"}


def test_another_machine_resumes_the_conversation_with_its_own_settings(
    day: Day, tmp_path: Path
) -> None:
    first_device = newest(day.store)["deviceId"]
    if isinstance(day.mount, Machine):
        store = day.store
        mount: Mount = Machine(day.mount.user, tmp_path, name="second").logged_in()
    else:
        store = Path(shutil.copytree(day.store, tmp_path / "store"))
        mount = Mount(store, tmp_path, name="second")
    with FakeModel(SCRIPT) as model:
        try:
            mount.mount()
            assert not (mount.path / ".env").exists()
            config = SECOND_CONFIG + hermes.config(model.port)
            (mount.path / "config.yaml").write_text(config)
            run = hermes.run_query(
                mount.path,
                hermes.ASK_AGAIN,
                cwd=mount.path / "workspace",
                resume=day.run.session_id,
            )
            left = (mount.path / "config.yaml").read_text()
            umount_when_idle(mount)
        finally:
            mount.clean()
    assert (run.rc, run.session_id) == (0, day.run.session_id)
    asked = model.turns[-1].messages
    assert ("user", LIVE) in asked
    assert ("assistant", "The day is over.") in asked
    assert SECOND_CONFIG in left
    sealed = texts(sealed_sessions(store, tmp_path / "sealed"))
    assert sealed[day.run.session_id][-1] == ("assistant", "You told me that your name is Ada.")
    assert newest(store)["deviceId"] != first_device


def umount_when_idle(mount: Mount, *options: str) -> subprocess.CompletedProcess[str]:
    """Unmount, once what Hermes has left running in the background has ended."""
    deadline = time.monotonic() + BACKGROUND_END_S
    while (
        done := mount.umount(*options, check=None)
    ).returncode == 1 and "in use by" in done.stderr:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)
    assert done.returncode == 0, done.stderr
    return done


def tables(home: Path) -> set[str]:
    with closing(sqlite3.connect(f"file:{home / hermes.DATABASE}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    return {name for (name,) in rows}


def test_a_gateway_and_a_conversation_share_the_mount_and_are_sealed_together(
    tmp_path: Path, model: FakeModel
) -> None:
    store = tmp_path / "store"
    mount = Mount(store, tmp_path)
    mount.run("init", f"file://{store}", "--state-dir", str(mount.state))
    program = (str(hermes_python()), "-m", "hermes_cli.main")
    try:
        mount.mount("--seal-after", "1")
        home = hermes.make_home(mount.path, model.port)
        with (tmp_path / "gateway.log").open("w") as log:
            gateway = subprocess.Popen(
                (*program, "gateway", "run", "--external-supervisor"),
                cwd=tmp_path,
                env=hermes.environment(home, home / "workspace"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            run = hermes.run_query(home, hermes.REMEMBER, cwd=home / "workspace")
            assert gateway.poll() is None, (tmp_path / "gateway.log").read_text()
            assert "delivery_obligations" in tables(home), "the gateway has been at work"
            mount.run("sync", str(home))
        finally:
            os.killpg(gateway.pid, signal.SIGTERM)
            gateway.wait(GATEWAY_END_S)
        assert run.rc == 0
        umount_when_idle(mount)
    finally:
        mount.clean()
    sealed = sealed_sessions(store, tmp_path / "sealed")
    assert texts(sealed)[run.session_id][0] == ("user", hermes.REMEMBER)
    assert "delivery_obligations" not in tables(tmp_path / "sealed")


# -- killed instead of ended -----------------------------------------------------------------


class Killer:
    """Kills the daemon a moment after the n-th request of a turn, having looked what is there."""

    def __init__(self, mount: Mount, *, request: int, delay_s: float) -> None:
        self._mount = mount
        self._request = request
        self._delay_s = delay_s
        self._seen = 0
        self._timer: threading.Timer | None = None
        self.rows: set[tuple[str, str, str]] = set()
        self.done = threading.Event()

    def __call__(self, request: Request) -> None:
        self._seen += request.is_turn
        if self._seen == self._request and self._timer is None:
            self._timer = threading.Timer(self._delay_s, self._kill)
            self._timer.start()

    def _kill(self) -> None:
        try:
            self.rows = committed(self._mount.path)
            self._mount.kill()
        finally:
            self.done.set()


def kill_the_daemon(tmp_path: Path, rng: random.Random) -> None:
    store = tmp_path / "store"
    mount = Mount(store, tmp_path)
    mount.run("init", f"file://{store}", "--state-dir", str(mount.state))
    killer = Killer(
        mount, request=rng.randint(1, 4), delay_s=rng.uniform(0, KILL_DELAY_S)
    )  # DO_ALL has four requests
    try:
        mount.mount("--seal-after", "1")
        with FakeModel(hermes.SCRIPT, on_request=killer) as model:
            hermes.make_home(mount.path, model.port)
            (mount.path / "workspace").mkdir(exist_ok=True)
            process = hermes.start_query(mount.path, hermes.DO_ALL, cwd=mount.path / "workspace")
            try:
                assert killer.done.wait(hermes.QUERY_TIMEOUT_S)
            finally:
                hermes.kill_group(process)
        assert killer.rows, "nothing was committed when the daemon was killed"
        mount.mount()
        assert killer.rows <= committed(mount.path)
        umount_when_idle(mount)
    finally:
        mount.clean()
    assert killer.rows <= rows_of(sealed_sessions(store, tmp_path / "sealed"))


@pytest.mark.parametrize("seed", range(2))
def test_no_committed_message_is_lost_when_the_daemon_is_killed_in_a_turn(
    seed: int, tmp_path: Path
) -> None:
    kill_the_daemon(tmp_path, random.Random(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 32))
def test_no_committed_message_is_lost_when_the_daemon_is_killed_at_many_points(
    seed: int, tmp_path: Path
) -> None:
    kill_the_daemon(tmp_path, random.Random(seed))


def test_a_message_that_a_killed_hermes_left_in_the_log_is_in_the_next_checkpoint(
    tmp_path: Path, model: FakeModel
) -> None:
    store = tmp_path / "store"
    mount = Mount(store, tmp_path)
    mount.run("init", f"file://{store}", "--state-dir", str(mount.state))
    try:
        mount.mount()
        hermes.make_home(mount.path, model.port)
        process = hermes.start_query(mount.path, hermes.THINK, cwd=mount.path / "workspace")
        try:
            model.wait_until_held()
        finally:
            hermes.kill_group(process)
        asked = hermes.THINK.encode()
        assert asked not in (mount.path / "state.db").read_bytes()
        assert asked in (mount.path / "state.db-wal").read_bytes()
        mount.run("sync", str(mount.path))
        (session,) = sealed_sessions(store, tmp_path / "sealed")
        assert session.messages == (("user", hermes.THINK),)
        umount_when_idle(mount)
    finally:
        mount.clean()


# -- a bare mountpoint -----------------------------------------------------------------------


def test_hermes_does_not_start_on_a_mountpoint_whose_agent_is_not_mounted(
    tmp_path: Path, model: FakeModel
) -> None:
    store = tmp_path / "store"
    mount = Mount(store, tmp_path)
    mount.run("init", f"file://{store}", "--state-dir", str(mount.state))
    with mounts.mounted(store, tmp_path):
        umount_when_idle(mount)
    left = mounts.tree(mount.path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    run = hermes.run_query(mount.path, hermes.REMEMBER, cwd=folder)
    assert run.rc != 0
    assert model.turns == []
    assert {path: d for path, d in mounts.tree(mount.path).items() if path in left} == left
    assert not (mount.path / "state.db").exists()
    mount.mount()
    try:
        assert (mount.path / "SOUL.md").exists()
        umount_when_idle(mount)
    finally:
        mount.clean()
