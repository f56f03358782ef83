"""An agent on a real homeserver, from the login to the logout, as a person has it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hpkfs_native
import pytest
from support.machines import Machine, machine
from support.mounts import Mount, tree

if TYPE_CHECKING:
    from support.homeserver import Testnet, User

pytestmark = [pytest.mark.pubky, pytest.mark.fuse]
DATA = Path(__file__).resolve().parents[1] / "data"


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


# -- login ----------------------------------------------------------------------------------


def test_what_was_not_approved_as_it_was_asked_is_given_back(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    made = Machine(user, tmp_path)
    folder = "/priv/hermes.pubky.app/v2/agents/default/"
    code, printed = made.login(capabilities=f"{folder}:r")
    assert (code, "was given back" in printed) == (4, True), printed
    code, printed = made.login(approver=testnet.new_user())
    assert (code, "not the agent's owner" in printed) == (4, True), printed
    assert not made.grant_file.exists()


def test_a_login_that_nobody_approves_ends(user: User, tmp_path: Path) -> None:
    made = Machine(user, tmp_path)
    done = made.run("login", made.store, "--state-dir", str(made.state), "--timeout", "1", check=4)
    assert "Nobody approved" in done.stderr
    assert done.stdout.count("pubkyauth://") == 1
    done = made.run(
        "login", made.store, "--state-dir", str(made.state), "--relay", "http://127.0.0.1:9/",
        "--timeout", "30", check=2,
    )  # fmt: skip
    assert "127.0.0.1:9" in done.stderr


def test_on_a_terminal_there_is_a_code_to_scan_and_a_countdown(user: User, tmp_path: Path) -> None:
    made = Machine(user, tmp_path)
    command = shlex.join(
        [sys.executable, "-m", "hpkfs.cli", "login", made.store, "--state-dir", str(made.state),
         "--timeout", "2"]
    )  # fmt: skip
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        env=made.env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stdout.count("▀") + done.stdout.count("▄") + done.stdout.count("█") > 100
    assert "Waiting for the approval: 0:0" in done.stdout


@pytest.mark.parametrize("command", ["login", "logout"])
def test_a_folder_and_a_template_need_no_login(command: str, user: User, tmp_path: Path) -> None:
    made = Machine(user, tmp_path)
    for address in (str(tmp_path), user.template_uri()):
        assert "login" in made.run(command, address, check=1).stderr
    made.run(command, "pubky://nobody", check=1)
    made.run(command, f"{made.store}@{'0' * 32}", check=1)


def test_a_logout_without_the_homeserver_keeps_the_grant(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    made = Machine(user, tmp_path).logged_in()
    grant = made.grant()
    testnet.homeserver.stop()
    made.run("logout", made.store, "--state-dir", str(made.state), check=2)
    assert made.grant() == grant
    testnet.homeserver.start()
    made.run("logout", made.store, "--state-dir", str(made.state))
    assert "not logged in" in made.run("logout", made.store, "--state-dir", str(made.state)).stdout


def test_the_grant_of_a_mount_is_seen_by_nobody(user: User, tmp_path: Path) -> None:
    with machine(user, tmp_path, "--seal-after", "1") as made:
        secret = made.grant()
        parts = [part for part in re.split(r"[:.\s]", secret) if len(part) > 20]
        (made.path / "workspace" / "x.txt").write_text("x")
        made.run("sync", str(made.path))
        user.revoke_all()
        (made.path / "workspace" / "y.txt").write_text("y")
        made.wait_for("auth-required")
        for process in Path("/proc").iterdir():
            for name in ("environ", "cmdline"):
                with contextlib.suppress(OSError):
                    data = (process / name).read_bytes() if process.name.isdecimal() else b""
                    assert not [part for part in parts if part.encode() in data], process
        for file in [*made.state.rglob("*"), *made.runtime.rglob("*")]:
            if file.is_file() and file != made.grant_file:
                data = file.read_bytes()
                assert not [part for part in parts if part.encode() in data], file


# -- one owner of the session ------------------------------------------------------------------


def test_read_only_mounts_and_checks_read_through_the_daemon(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    with machine(user, tmp_path) as made:
        (made.path / "workspace" / "x.txt").write_text("one")
        made.run("sync", str(made.path))
        beside = Machine(user, tmp_path, name="beside")
        beside.state = made.state
        try:
            with testnet.proxy() as proxy:
                made.run("evict", str(made.path))  # its connections are new afterwards
                for _ in range(3):
                    (made.path / "workspace" / "x.txt").write_text("two")
                    made.run("sync", str(made.path), check=None)
                opened = proxy.count("POST")
                beside.mount("--read-only")
                assert (beside.path / "workspace" / "x.txt").read_text() == "two"
                rows = json.loads(beside.run("history", str(beside.path), "--json").stdout)
                assert len(rows["checkpoints"]) >= 2
                made.run("fsck", made.store, "--read-data")
                made.told("history", check=0)
                assert proxy.count("POST") == opened, "no session was opened besides"
            made.kill()
            beside.run("umount", str(beside.path))
            beside.mount("--at", rows["checkpoints"][0]["snapshot_id"])
            assert (beside.path / "workspace" / "x.txt").read_text() == "two"
            made.run("fsck", str(made.state))
            made.mount()
            (made.path / "workspace" / "x.txt").write_text("three")
            made.run("sync", str(made.path))
            assert (beside.path / "SOUL.md").read_bytes() == (made.path / "SOUL.md").read_bytes()
        finally:
            beside.clean()


# -- a homeserver that is away --------------------------------------------------------------


def test_work_goes_on_without_the_homeserver_and_is_sent_in_order(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    with machine(user, tmp_path) as made:
        made.run("fetch", str(made.path), "--all")
        testnet.homeserver.stop()
        for number in range(3):
            (made.path / "workspace" / "n.txt").write_text(str(number))
            made.run("sync", str(made.path), check=2)
        assert made.status()["pending"]["checkpoints"] == 3
        made.umount("--no-publish", check=2)
        made.mount()  # without network: a budget of five seconds
        assert (made.path / "workspace" / "n.txt").read_text() == "2"
        assert made.status()["state"] == "pending"
        made.umount("--no-publish", check=2)
        made.mount("--offline")
        (made.path / "workspace" / "n.txt").write_text("3")
        made.umount(check=2)
        testnet.homeserver.start()
        told = made.told("sync", check=0)
        assert (told["state"], len(told["published"])) == ("clean", 4)
        rows = made.told("history", check=0)["checkpoints"]
        assert len(rows) == 5
    with machine(user, tmp_path, name="second") as second:
        assert (second.path / "workspace" / "n.txt").read_text() == "3"


def publish_big_file(user: User, tmp_path: Path, *, size: int) -> bytes:
    """Have an agent with `workspace/big.bin` on the homeserver; what is in it."""
    data = os.urandom(size)
    with machine(user, tmp_path) as made:
        (made.path / "workspace" / "big.bin").write_bytes(data)
        made.run("sync", str(made.path))
    return data


def test_a_homeserver_that_pauses_in_a_hydration_is_waited_for(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    data = publish_big_file(user, tmp_path, size=12_000_000)
    with machine(user, tmp_path, "--lazy", name="second") as second:
        with (second.path / "workspace" / "big.bin").open("rb") as file:
            assert file.read(100_000) == data[:100_000]
            testnet.homeserver.pause()
            timer = threading.Timer(3, testnet.homeserver.resume)
            timer.start()
            rest = file.read()
            timer.join()
        assert data[:100_000] + rest == data


def test_a_homeserver_that_dies_in_a_hydration_is_an_error_and_then_none(
    testnet: Testnet, user: User, tmp_path: Path
) -> None:
    data = publish_big_file(user, tmp_path, size=9_000_000)
    with machine(user, tmp_path, "--lazy", name="second") as second:
        testnet.homeserver.kill()
        with pytest.raises(OSError, match="Input/output error"):
            (second.path / "workspace" / "big.bin").read_bytes()
        second.wait_for("offline")
        testnet.homeserver.start()
        second.run("sync", str(second.path))
        assert (second.path / "workspace" / "big.bin").read_bytes() == data


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "objects/"), ("PUT", "snapshots/"), ("LOCK", "head")]
)
def test_a_homeserver_that_dies_in_a_publish_gets_everything_later(
    method: str, path: str, testnet: Testnet, user: User, tmp_path: Path
) -> None:
    with machine(user, tmp_path) as made:
        with testnet.proxy() as proxy:
            proxy.fault("hang", method=method, path=path)
            (made.path / "workspace" / "x.bin").write_bytes(os.urandom(3_000_000))
            syncing = made.start("sync", str(made.path))
            while not proxy.count(method, path):
                time.sleep(0.05)
            testnet.homeserver.kill()
            syncing.kill()
            syncing.wait(20)
        testnet.homeserver.start()
        made.run("sync", str(made.path))
        assert made.status()["state"] == "clean"
        made.run("fsck", str(made.path), "--read-data")
        assert len(made.told("history", check=0)["checkpoints"]) == 2


# -- grants and quotas ------------------------------------------------------------------------


def test_a_grant_that_is_revoked_while_mounted_is_healed_by_a_login(
    user: User, tmp_path: Path
) -> None:
    with machine(user, tmp_path) as made:
        user.revoke_all()
        (made.path / "workspace" / "x.txt").write_text("meanwhile")
        done = made.run("sync", str(made.path), check=4)
        assert "hpkfs login" in done.stderr
        assert made.wait_for("auth-required")["exit_code"] == 4
        (made.path / "workspace" / "y.txt").write_text("and later")
        code, printed = made.login()
        assert code == 0, printed
        made.wait_for("clean")
    with machine(user, tmp_path, name="second") as second:
        assert (second.path / "workspace" / "y.txt").read_text() == "and later"


def test_a_logout_while_mounted_keeps_the_work(user: User, tmp_path: Path) -> None:
    with machine(user, tmp_path) as made:
        made.run("logout", str(made.path))
        assert made.grant_file.read_text() == ""
        (made.path / "workspace" / "x.txt").write_text("still")
        assert made.wait_for("auth-required")
        made.run("sync", str(made.path), check=4)
        assert made.login()[0] == 0
        made.wait_for("clean")


def test_a_grant_that_another_process_uses_is_opened_again(user: User, tmp_path: Path) -> None:
    with machine(user, tmp_path) as made:
        client = hpkfs_native.Client(network="testnet", request_timeout_s=9, read_timeout_s=9)
        for number in range(3):
            client.restore(made.grant()).wait(20)  # signs the daemon out
            (made.path / "workspace" / "x.txt").write_text(str(number))
            made.run("sync", str(made.path))
        assert made.status()["state"] == "clean"


def test_a_full_homeserver_is_a_state_and_space_heals_it(user: User, tmp_path: Path) -> None:
    with machine(user, tmp_path) as made:
        user.set_quota(1)
        (made.path / "workspace" / "big.bin").write_bytes(os.urandom(3_000_000))
        done = made.run("sync", str(made.path), check=5)
        assert "no space left" in done.stderr
        assert made.status()["state"] == "quota"
        user.set_quota(None)
        made.run("sync", str(made.path))
        assert made.status()["state"] == "clean"


# -- templates ----------------------------------------------------------------------------------


def test_a_public_template_mounts_read_only_without_a_login(user: User, tmp_path: Path) -> None:
    remote = next((DATA / "vectors" / "04-template" / "remote").rglob("head.json")).parent
    template_id = json.loads((remote / "head.json").read_text())["templateId"]
    folder = f"/pub/hermes.pubky.app/v2/templates/{template_id}/"
    client = hpkfs_native.Client(network="testnet", request_timeout_s=9, read_timeout_s=9)
    session = client.restore(user.grant(f"{folder}:rw")).wait(20)
    for file in remote.rglob("*"):
        if file.is_file():
            session.put(folder + str(file.relative_to(remote)), file.read_bytes()).wait(20)
    made = Mount(user.template_uri(template_id), tmp_path)
    try:
        made.mount()
        assert (made.path / "SOUL.md").read_bytes()
        with pytest.raises(OSError, match="Read-only"):
            (made.path / "SOUL.md").write_text("x")
        made.run("fsck", made.store, "--read-data")
    finally:
        made.clean()
