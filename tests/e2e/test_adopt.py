"""A home of any kind becomes an agent: `init --from-home`, `adopt`, and the way back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import unicodedata
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import hermes
from support.mounts import Mount

from hpkfs import cli, importer
from hpkfs.copier import Copier
from hpkfs.errors import BusyError, HpkfsError, QuotaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.fake_model import FakeModel

pytestmark = [pytest.mark.fuse]

GIB = 1 << 30
DEEP = 1_200  # more than Python's stack
NFD = unicodedata.normalize("NFD", "Café.md")
UNDO_TIMEOUT_S = 60
KILL_AFTER = """
import os
from hpkfs import importer
from hpkfs.copier import Copier
from hpkfs.publisher import Publisher
call = {after}
if {is_async}:
    async def call_and_die(*arguments):
        await call(*arguments)
        os.kill(os.getpid(), 9)
else:
    def call_and_die(*arguments):
        call(*arguments)
        os.kill(os.getpid(), 9)
{after} = call_and_die
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A small home without a run of Hermes: what travels, what stays, a database in WAL mode."""
    folder = tmp_path / "agent-home"
    write(folder / "SOUL.md", b"I am small.\n")
    write(folder / "memories" / "USER.md", b"Ada\n")
    write(folder / "skills" / "greeting" / "SKILL.md", hermes.SKILL.encode())
    write(folder / "workspace" / "notes" / "note.md", b"A note.\n")
    write(folder / ".env", b"KEY=secret\n")
    write(folder / "logs" / "agent.log", b"started\n")
    (folder / ".env").chmod(0o600)
    (folder / "workspace" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "workspace" / "run.sh").chmod(0o755)
    folder.chmod(0o700)
    return folder


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Not mounted yet."""
    made = Mount(tmp_path / "store", tmp_path)
    try:
        yield made
    finally:
        made.clean()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def whole(path: Path) -> dict[str, tuple[int, str]]:
    """Mode, and digest or target, of everything below a folder; of large files the size only."""
    found = {}
    for folder, folders, names in os.walk(path):
        for name in [*folders, *names]:
            entry = Path(folder, name)
            status = entry.lstat()
            what = ""
            if stat.S_ISLNK(status.st_mode):
                what = os.readlink(entry)
            elif stat.S_ISREG(status.st_mode):
                is_large = status.st_size >= GIB
                what = str(status.st_size) if is_large else sha256(entry.read_bytes()).hexdigest()
            found[str(entry.relative_to(path))] = (status.st_mode, what)
    return {name: value for name, value in found.items() if name.split("/")[0] != ".hpkfs"}


def make(mount: Mount, home: Path, *, code: int | None = 0) -> dict[str, Any]:
    """Run `init --from-home`; return its report."""
    done = mount.run(
        "init", f"file://{mount.store}", "--from-home", str(home), "--json",
        "--state-dir", str(mount.state), check=code,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def adopted(mount: Mount, home: Path, *, code: int | None = 0) -> dict[str, Any]:
    """Run `adopt`; return its report. The mount's path is the home's from here on."""
    mount.path = home
    done = mount.run(
        "adopt", str(home), f"file://{mount.store}", "--json", "--state-dir", str(mount.state),
        check=code,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_and_kill(code: str, *, after: str) -> None:
    """Run a line of Python that is killed as soon as a function of ours has returned."""
    patch = KILL_AFTER.format(after=after, is_async=after.startswith("Publisher"))
    killed = subprocess.run(
        (sys.executable, "-c", f"{patch}{code}"), timeout=UNDO_TIMEOUT_S, check=False
    )
    assert killed.returncode == -9


def reasons(report: dict[str, Any], key: str) -> dict[str, str]:
    return {entry["path"]: entry["reason"] for entry in report[key]}


# -- adopt -----------------------------------------------------------------------------------


def test_an_adopted_home_is_mounted_in_its_place_with_every_byte(home: Path, mount: Mount) -> None:
    before = whole(home)
    report = adopted(mount, home)
    assert mount.is_mounted()
    shown = whole(home)
    assert {name: shown.get(name) for name in before} == before
    kept = Path(f"{home}.before-hpkfs")
    assert whole(kept) == before
    assert report["before"] == str(kept)
    mount.umount()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_the_printed_command_undoes_an_adoption(home: Path, mount: Mount) -> None:
    before = whole(home)
    report = adopted(mount, home)
    program = Path(mount.env["HOME"]) / "bin" / "hpkfs"
    write(program, f'#!/bin/sh\nexec {sys.executable} -m hpkfs.cli "$@"\n'.encode())
    program.chmod(0o755)
    env = {**mount.env, "PATH": f"{program.parent}:{mount.env['PATH']}"}
    subprocess.run(
        ("sh", "-c", report["undo"]), env=env, check=True, timeout=UNDO_TIMEOUT_S,
        capture_output=True,
    )  # fmt: skip
    assert whole(home) == before
    assert not mount.is_mounted()
    assert not Path(f"{home}.before-hpkfs").exists()


def test_an_undone_adoption_can_be_done_again_elsewhere(home: Path, mount: Mount) -> None:
    adopted(mount, home)
    mount.umount()
    shutil.rmtree(home)
    Path(f"{home}.before-hpkfs").rename(home)
    done = mount.run("adopt", str(home), f"file://{mount.store}", check=1)
    assert "There is an agent in" in done.stderr
    mount.state = mount.state.with_name("another-state")
    mount.store = f"{mount.store}-2"
    adopted(mount, home)
    assert (home / "SOUL.md").read_bytes() == b"I am small.\n"
    mount.umount()


def test_a_home_that_cannot_be_mounted_after_all_is_put_back(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[5], "cron").touch()
        return subprocess.CompletedProcess(command, 1)

    before = whole(home)
    monkeypatch.setattr(subprocess, "run", fail)
    state = ("--state-dir", str(tmp_path / "state"))
    assert cli.main(["adopt", str(home), f"file://{tmp_path}/store", *state]) == 1
    assert whole(home) == before
    assert f"{home} is as it was" in capfd.readouterr().err


@pytest.mark.parametrize(
    "after",
    ["Copier.flush", "Publisher.publish", "Copier.differences", "os.sync", "importer._move_aside"],
)
def test_a_killed_adoption_loses_nothing(after: str, home: Path, mount: Mount) -> None:
    before = whole(home)
    arguments = f"{str(home)!r}, {mount.store!r}, {str(mount.state)!r}"
    run_and_kill(f"importer.adopt({arguments})", after=after)
    kept = Path(f"{home}.before-hpkfs")
    assert whole(kept if kept.exists() else home) == before
    if kept.exists():
        shutil.rmtree(home, ignore_errors=True)
        kept.rename(home)
    mount.state, mount.store = mount.state.with_name("again"), f"{mount.store}-again"
    adopted(mount, home)
    shown = whole(home)
    assert {name: shown.get(name) for name in before} == before
    mount.umount()


def test_an_adoption_killed_between_its_two_steps_says_how_to_go_back(
    home: Path, mount: Mount
) -> None:
    before = whole(home)
    Path(home).rename(f"{home}.before-hpkfs")
    done = mount.run("adopt", str(home), f"file://{mount.store}", check=1)
    command = f"mv {home}.before-hpkfs {home}"
    assert f"`{command}`" in done.stderr
    subprocess.run(command.split(), check=True, timeout=UNDO_TIMEOUT_S)
    assert whole(home) == before


def test_a_home_in_use_is_not_adopted_and_the_program_is_named(home: Path, mount: Mount) -> None:
    before = whole(home)
    with (home / "logs" / "agent.log").open("a") as log:
        tail = subprocess.Popen(("sleep", "infinity"), stdout=log)
        try:
            done = mount.run("adopt", str(home), f"file://{mount.store}", check=1)
        finally:
            tail.kill()
            tail.wait()
    assert f"process {tail.pid} (sleep)" in done.stderr
    assert whole(home) == before
    assert not Path(mount.store).exists()


@pytest.mark.parametrize(
    "refused",
    ["is a mountpoint", "holds the store", "holds the state", "was kept before", "is bare"],
)
def test_a_home_that_cannot_be_moved_is_not_adopted(
    refused: str, home: Path, mount: Mount, tmp_path: Path
) -> None:
    store, state, target = Path(mount.store), mount.state, home
    match refused:
        case "is a mountpoint":
            target = Path("/proc")
        case "holds the store":
            store = home / "store"
        case "holds the state":
            state = home / "state"
        case "was kept before":
            Path(f"{home}.before-hpkfs").mkdir()
        case _:
            assert refused == "is bare"
            write(home / "NOT-MOUNTED.txt", b"")
            write(home / "cron", b"")
    before = whole(home)
    done = mount.run("adopt", str(target), f"file://{store}", "--state-dir", str(state), check=1)
    assert done.stderr.startswith("hpkfs: ")
    assert whole(home) == before
    assert not store.exists()
    assert not state.exists()


# Each makes one step of an adoption fail.


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)


def fail_to_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> list[str]:
        raise QuotaError("The store is full.")

    monkeypatch.setattr("hpkfs.publisher.Publisher.publish", full)


def change_a_file_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copier.flush

    def flush(self: Copier) -> None:
        copy(self)
        Path(os.environ["TESTED_HOME"], "SOUL.md").write_text("I am another.\n")

    monkeypatch.setattr(Copier, "flush", flush)


def add_a_file_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copier.flush

    def flush(self: Copier) -> None:
        copy(self)
        Path(os.environ["TESTED_HOME"], "workspace", "late.md").write_text("Late.\n")

    monkeypatch.setattr(Copier, "flush", flush)


def fail_to_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(old: str, new: str) -> None:
        if str(new).endswith(importer.BEFORE_SUFFIX):
            raise OSError(16, "Device or resource busy")
        rename(old, new)

    monkeypatch.setattr(os, "rename", refuse)


def fail_to_make_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir

    def refuse(path: str, mode: int = 0o777) -> None:
        if path == os.environ["TESTED_HOME"]:
            raise OSError(28, "No space left on device")
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", refuse)


@pytest.mark.parametrize(
    "fault",
    [
        fail_to_write,
        fail_to_publish,
        change_a_file_meanwhile,
        add_a_file_meanwhile,
        fail_to_rename,
        fail_to_make_the_directory,
    ],
    ids=lambda fault: fault.__name__,
)
def test_an_adoption_that_fails_leaves_the_home_as_it_was_and_can_be_repeated(
    fault: Callable[[pytest.MonkeyPatch], None], home: Path, tmp_path: Path
) -> None:
    store, state = tmp_path / "store", tmp_path / "state"
    before = whole(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_HOME", str(home))
        fault(patch)
        with pytest.raises((HpkfsError, OSError)):
            importer.adopt(str(home), f"file://{store}", str(state))
    shown = whole(home)
    changed = {name for name in shown if shown[name] != before.get(name)}
    assert changed <= {"SOUL.md", "workspace/late.md", "workspace"}, "only what we changed"
    assert before.keys() <= shown.keys()
    assert not (store / "head.json").exists()
    report = importer.adopt(str(home), f"file://{store}", str(state))
    assert whole(Path(str(report["before"]))) == shown
    assert list(home.iterdir()) == []


def test_a_file_that_changed_while_it_was_copied_is_named(home: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_HOME", str(home))
        change_a_file_meanwhile(patch)
        with pytest.raises(BusyError, match=r"changed while it was copied: SOUL\.md\."):
            importer.adopt(str(home), f"file://{tmp_path}/store", str(tmp_path / "state"))


@pytest.mark.hermes
@pytest.mark.slow
def test_a_real_home_is_adopted_and_hermes_goes_on_in_it(
    real_home: hermes.RealHome, mount: Mount, tmp_path: Path, model: FakeModel
) -> None:
    home = Path(shutil.copytree(real_home.home, tmp_path / "real", symlinks=True))
    shutil.copytree(real_home.workspace, home / "workspace", symlinks=True)
    hermes_config = home / "config.yaml"
    hermes_config.write_text(hermes.config(model.port))
    report = adopted(mount, home)
    assert report["exit_code"] == 0
    run = hermes.run_query(
        home, hermes.ASK_AGAIN, cwd=home / "workspace", resume=real_home.sessions[0]
    )
    assert (run.rc, run.session_id) == (0, real_home.sessions[0])
    assert ("user", hermes.DO_ALL) in model.turns[-1].messages
    assert (home / ".env").stat().st_mode & 0o777 == 0o600
    mount.umount()


# -- init --from-home, with every oddity -----------------------------------------------------


def tells_holes(file: Path) -> bool:
    """Whether the disk says where a file has holes; without that nobody can copy them as such."""
    with file.open("rb") as opened:
        return os.lseek(opened.fileno(), 0, os.SEEK_HOLE) < file.stat().st_size


def longest_name(folder: Path) -> str:
    """The longest name that the disk takes: an overlay may take fewer bytes than it says."""
    for length in range(252, 100, -1):
        with contextlib.suppress(OSError):
            (folder / ("n" * length + ".md")).touch()
            return "n" * length + ".md"
    raise AssertionError(f"{folder} takes no long name")


def test_oddities_of_a_home_are_taken_over_or_reported(home: Path, mount: Mount) -> None:
    work = home / "workspace"
    os.mkfifo(work / "fifo")
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(work / "socket"))
    (work / "dangling").symlink_to("nowhere.md")
    (work / "loop").symlink_to("loop")
    (work / "outside").symlink_to("/etc/passwd")
    (home / "local-link").symlink_to("/usr/bin/python3")
    long = longest_name(work)
    write(work / long, b"long\n")
    write(work / NFD, b"decomposed\n")
    write(work / "Case.md", b"upper\n")
    write(work / "case.md", b"lower\n")
    write(work / "linked.md", b"twice\n")
    os.link(work / "linked.md", work / "again.md")
    write(work / "deep" / ".git" / "config", b"[core]\n")
    latin = os.fsencode(work) + b"/caf\xe9.md"
    Path(os.fsdecode(latin)).write_bytes(b"latin\n")
    with (work / "sparse.bin").open("wb") as sparse:
        sparse.truncate(4 * GIB)
    with (home / "hermes-agent").open("wb") as sparse:
        sparse.truncate(GIB)
        sparse.seek(GIB // 2)
        sparse.write(b"in the middle")
    expected = whole(home)

    report = make(mount, home)

    assert report["exit_code"] == 0
    skipped = reasons(report, "skipped")
    assert set(skipped) == {"workspace/socket"}
    assert "socket" in skipped["workspace/socket"]
    kept = reasons(report, "kept_local")
    assert set(kept) == {
        "workspace/fifo",
        "workspace/outside",
        "workspace/caf\\xe9.md",
        "workspace/case.md",
        "workspace/sparse.bin",
        "workspace/deep/.git",
    }
    assert "workspace/Case.md" in kept["workspace/case.md"]
    assert "workspace/" + unicodedata.normalize("NFC", NFD) in logical_paths(mount)
    backing = sum(file.stat().st_blocks * 512 for file in mount.state.rglob("*"))
    if tells_holes(work / "sparse.bin"):
        assert backing < 64 << 20, "holes stay holes"
    mount.mount()
    del expected["workspace/socket"]
    shown = whole(mount.path)
    assert {name: shown.get(name) for name in expected} == expected
    linked = mount.path / "workspace" / "linked.md"
    assert linked.stat().st_ino == (mount.path / "workspace" / "again.md").stat().st_ino
    mount.umount()


def test_folders_deeper_than_the_stack_are_taken_over(home: Path, mount: Mount) -> None:
    deep = str(home / "workspace")
    try:
        for _ in range(DEEP):
            deep += "/d"
            os.mkdir(deep)
        Path(deep, "deep.md").write_text("deep\n")
        report = make(mount, home)
    finally:  # nor can Python remove it
        command = ("rm", "-rf", str(home / "workspace" / "d"))
        subprocess.run(command, timeout=UNDO_TIMEOUT_S, check=True)
    assert report["skipped"] == []
    assert [entry["reason"] for entry in report["kept_local"]] == [
        "its name is longer than 1,024 bytes"
    ]
    mount.mount()
    assert Path(str(mount.path) + deep.removeprefix(str(home)), "deep.md").read_text() == "deep\n"
    mount.umount()


def test_a_database_with_a_running_writer_is_taken_over_as_of_one_instant(
    home: Path, mount: Mount
) -> None:
    with closing(sqlite3.connect(home / "kanban.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("CREATE TABLE tasks (name)")
        writer.execute("INSERT INTO tasks VALUES ('committed')")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO tasks VALUES ('open')")
        report = make(mount, home)
        writer.execute("COMMIT")
    assert report["skipped"] == []
    mount.mount()
    with closing(sqlite3.connect(mount.path / "kanban.db")) as reader:
        assert reader.execute("SELECT name FROM tasks").fetchall() == [("committed",)]
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    mount.umount()


def test_a_damaged_conversation_is_taken_over_as_it_is_and_said_not_to_be_saved(
    home: Path, mount: Mount
) -> None:
    with closing(sqlite3.connect(home / "state.db")) as database, database:
        database.execute("CREATE TABLE sessions (id, cwd)")
        database.executemany("INSERT INTO sessions VALUES (?, ?)", [("x" * 900, "/")] * 50)
    damaged = bytearray((home / "state.db").read_bytes())
    damaged[5000:9000] = b"\xff" * 4000
    write(home / "state.db", bytes(damaged))
    write(home / "state.db-wal", b"no log")
    before = whole(home)

    report = make(mount, home, code=6)

    assert (report["state"], report["exit_code"]) == ("corrupt", 6)
    assert "SOUL.md" in report["travels"]
    assert "state.db" not in report["travels"]
    assert "state.db" in reasons(report, "kept_local")
    assert "profile/SOUL.md" in logical_paths(mount)
    assert whole(home) == before
    mount.mount()
    assert (mount.path / "state.db").read_bytes() == damaged
    mount.umount(check=6)


def test_regression_an_empty_conversation_is_no_alarm(home: Path, mount: Mount) -> None:
    (home / "state.db").touch()
    report = make(mount, home)
    assert (report["state"], report["exit_code"]) == ("clean", 0)
    assert "state.db" not in report["travels"]
    mount.mount()
    with closing(sqlite3.connect(mount.path / "state.db")) as database, database:
        database.execute("CREATE TABLE sessions (id)")
    mount.run("sync", str(mount.path), check=6)
    assert mount.status()["state"] == "corrupt", "a database that is no conversation is one"
    mount.umount(check=6)


def test_an_interrupted_import_is_begun_anew(home: Path, mount: Mount) -> None:
    arguments = f"from_home={str(home)!r}, state_dir={str(mount.state)!r}"
    run_and_kill(f"importer.init_store({mount.store!r}, {arguments})", after="Copier.flush")
    (home / "SOUL.md").write_text("Changed since.\n")
    report = make(mount, home)
    assert report["exit_code"] == 0
    mount.mount()
    assert (mount.path / "SOUL.md").read_text() == "Changed since.\n"
    mount.umount()


def test_a_store_and_a_state_directory_inside_the_home_are_left_out(
    home: Path, mount: Mount
) -> None:
    mount.store, mount.state = str(home / "store"), home / "deep" / "state"
    report = make(mount, home)
    assert reasons(report, "skipped") == {
        "store": "belongs to hpkfs",
        "deep/state": "belongs to hpkfs",
    }
    mount.mount()
    assert not (mount.path / "store").exists()
    assert (mount.path / "deep").is_dir()
    mount.umount()


def test_a_home_without_a_workspace_gets_an_empty_one(home: Path, mount: Mount) -> None:
    shutil.rmtree(home / "workspace")
    make(mount, home)
    mount.mount()
    assert list((mount.path / "workspace").iterdir()) == []
    mount.umount()


def logical_paths(mount: Mount) -> set[str]:
    head = json.loads((Path(mount.store) / "head.json").read_text())
    text = (Path(mount.store) / "snapshots" / f"{head['snapshotId']}.json").read_text()
    return set(json.loads(text)["files"])
