"""The main job as an ordinary user: mounted through the setuid helper, Hermes on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import closing
from socket import AF_UNIX, socket
from typing import TYPE_CHECKING, Any

import pytest
from support import hermes, venvs
from support.unprivileged import NOBODY

if TYPE_CHECKING:
    from pathlib import Path

    from support.fake_model import FakeModel
    from support.unprivileged import Unprivileged

pytestmark = [pytest.mark.fuse, pytest.mark.net]
STORE = "agents/ada"
TIMEOUT_S = 90


def as_root(user: Unprivileged, *command: str) -> None:
    """Run a command as root in the user's namespace."""
    enter = "nsenter", f"--mount=/proc/{user.holder_pid}/ns/mnt"
    subprocess.run((*enter, *command), check=True, capture_output=True, timeout=TIMEOUT_S)


def write(user: Unprivileged, path: str, data: bytes) -> Path:
    """Make a file of the user's."""
    file = user.home / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    for entry in (file, *file.parents):
        if entry == user.home:
            break
        os.chown(entry, NOBODY, NOBODY)
    return file


def hpkfs(user: Unprivileged, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = user.run("hpkfs", *arguments, timeout_s=TIMEOUT_S, check=False)
    assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def newest(user: Unprivileged) -> dict[str, Any]:
    store = user.home / STORE
    head = json.loads((store / "head.json").read_text())
    snapshot: dict[str, Any] = json.loads(
        (store / "snapshots" / f"{head['snapshotId']}.json").read_text()
    )
    return snapshot


def test_an_ordinary_user_makes_mounts_writes_saves_and_unmounts(
    unprivileged: Unprivileged,
) -> None:
    user = unprivileged
    hpkfs(user, "init", STORE)
    hpkfs(user, "mount", STORE, "mnt")
    user.run("sh", "-c", "echo mine > mnt/workspace/mine.md && chmod 700 mnt/workspace/mine.md")
    assert user.run("stat", "-c", "%u %a", "mnt/workspace/mine.md").stdout == "65534 700\n"
    assert json.loads(hpkfs(user, "status", "mnt", "--json", code=2).stdout)["state"] == "dirty"
    hpkfs(user, "sync", "mnt")
    assert newest(user)["files"]["workspace/mine.md"]["executable"]
    assert "mnt" in hpkfs(user, "list").stdout
    user.run("sh", "-c", "echo later > mnt/workspace/later.md")
    hpkfs(user, "umount", "mnt")
    assert "workspace/later.md" in newest(user)["files"]
    assert f"{user.home}/mnt" not in user.run("cat", "/proc/self/mounts").stdout
    assert {file.stat().st_uid for file in (user.home / STORE).rglob("*")} == {NOBODY}


def test_doctor_finds_nothing_wrong_for_an_ordinary_user(unprivileged: Unprivileged) -> None:
    told = hpkfs(unprivileged, "doctor", "--json").stdout
    assert [finding for finding in json.loads(told)["findings"] if not finding["ok"]] == []


@pytest.mark.parametrize(
    ("damage", "finding", "remedy"),
    [
        (("chmod", "0600", "/dev/fuse"), "device", "chmod 0666 /dev/fuse"),
        (("umount", "/dev/fuse"), "device", "chmod 0666 /dev/fuse"),
        (("chmod", "0755", "fusermount3"), "fusermount3", "chmod u+s"),
    ],
    ids=["the device is closed", "the device is as on this machine", "the helper is not setuid"],
)
def test_doctor_and_mount_name_what_is_missing_and_its_remedy(
    damage: tuple[str, ...], finding: str, remedy: str, unprivileged: Unprivileged
) -> None:
    user = unprivileged
    helper = shutil.which("fusermount3")
    assert helper
    hpkfs(user, "init", STORE)
    as_root(user, *(os.path.realpath(helper) if word == "fusermount3" else word for word in damage))
    told = user.run("hpkfs", "doctor", "--json", check=False)
    bad = [found for found in json.loads(told.stdout)["findings"] if not found["ok"]]
    assert [found["name"] for found in bad] == [finding]
    assert remedy in bad[0]["remedy"]
    refused = hpkfs(user, "mount", STORE, "mnt", code=1)
    assert remedy in refused.stderr
    assert not (user.home / "mnt").exists()


def test_what_an_ordinary_user_may_not_read_of_a_home_is_named_and_the_rest_taken(
    unprivileged: Unprivileged,
) -> None:
    user = unprivileged
    write(user, "old/SOUL.md", b"I am.\n")
    write(user, "old/workspace/mine.md", b"mine\n")
    write(user, "old/workspace/closed.md", b"root's\n").chmod(0o000)
    os.chown(user.home / "old/workspace/closed.md", 0, 0)
    closed = user.home / "old" / "workspace" / "closed"
    closed.mkdir(mode=0o700)
    write(user, "old/workspace/strange.md", b"made by root\n").chmod(0o644)
    os.chown(user.home / "old/workspace/strange.md", 0, 0)
    with closing(socket(AF_UNIX)) as listening:
        listening.bind(str(user.home / "old" / "gateway.sock"))
    done = hpkfs(user, "init", STORE, "--from-home", "old", "--json")
    report = json.loads(done.stdout)
    skipped = {entry["path"]: entry["reason"] for entry in report["skipped"]}
    assert skipped.pop("gateway.sock").startswith("is a socket")
    assert skipped == {
        "workspace/closed.md": "cannot be read: Permission denied",
        "workspace/closed": "cannot be listed: Permission denied",
    }
    assert {"SOUL.md", "workspace/mine.md", "workspace/strange.md"} <= set(report["travels"])
    hpkfs(user, "mount", STORE, "mnt")
    owner = user.run("stat", "-c", "%u", "mnt/workspace/strange.md").stdout
    assert owner == "65534\n", "an ordinary user's copy is the user's"
    user.run("sh", "-c", "echo more >> mnt/workspace/strange.md")
    hpkfs(user, "umount", "mnt")


def test_an_ordinary_user_adopts_a_home_and_undoes_it(unprivileged: Unprivileged) -> None:
    user = unprivileged
    write(user, ".hermes/SOUL.md", b"I am.\n")
    write(user, ".hermes/.env", b"KEY=1\n").chmod(0o600)
    told = json.loads(hpkfs(user, "adopt", ".hermes", "--json").stdout)
    assert user.run("cat", ".hermes/SOUL.md", ".hermes/.env").stdout == "I am.\nKEY=1\n"
    assert f"{user.home}/.hermes fuse.hpkfs" in user.run("cat", "/proc/self/mounts").stdout
    user.run("sh", "-c", told["undo"], timeout_s=TIMEOUT_S)
    assert sorted(os.listdir(user.home / ".hermes")) == [".env", "SOUL.md"]
    assert not (user.home / ".hermes.before-hpkfs").exists()


# -- Hermes ----------------------------------------------------------------------------------


def run_hermes(
    user: Unprivileged, home: str, text: str, *, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a query of the real Hermes as the user; its venv is shown where the user may read."""
    where = user.home / "hermes-venv"
    if not where.exists():
        where.mkdir()
        as_root(user, "mount", "--bind", str(venvs.hermes_python().parents[1]), str(where))
    _, *arguments = hermes.query_argv(text)
    variables = hermes.environment(user.home / home, cwd)
    settings = [
        f"{name}={value}" for name, value in variables.items() if name not in ("HOME", "PATH")
    ]
    return user.run(
        "env", f"--chdir={cwd}", *settings, str(where / "bin" / "python"), *arguments,
        timeout_s=hermes.QUERY_TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.hermes
@pytest.mark.slow
def test_hermes_of_an_ordinary_user_lives_on_the_mount_and_not_below_it(
    unprivileged: Unprivileged, model: FakeModel
) -> None:
    user = unprivileged
    hpkfs(user, "init", STORE)
    hpkfs(user, "mount", STORE, "mnt")
    config = write(user, "config.yaml", hermes.config(model.port).encode())
    user.run("cp", str(config), "mnt/config.yaml")
    done = run_hermes(user, "mnt", hermes.DO_ALL, cwd=user.home / "mnt" / "workspace")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "All is done."
    hpkfs(user, "umount", "mnt")
    files = newest(user)["files"]
    assert {
        "conversations/state.sqlite3",
        "profile/memories/USER.md",
        "profile/skills/greeting/SKILL.md",
        "workspace/notes/note.md",
        "workspace/counted.txt",
    } <= set(files)

    asked = len(model.turns)
    bare = user.run("ls", "-A", "mnt").stdout
    assert run_hermes(user, "mnt", hermes.REMEMBER, cwd=user.home).returncode != 0
    assert len(model.turns) == asked
    assert "state.db" not in user.run("ls", "-A", "mnt").stdout
    assert set(bare.split()) == {"cron", "NOT-MOUNTED.txt"}
