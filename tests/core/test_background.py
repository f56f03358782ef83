from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hpkfs import background

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 20
# Starts a daemon; the arguments are how it goes and where its log is.
START = """
import json, os, sys, time
from hpkfs import background
from hpkfs.errors import HpkfsError, QuotaError

how, log_path = sys.argv[1:]

def run(ready):
    if how == "quota":
        raise QuotaError("Full.", kept="All.", next_step="Free some.")
    if how == "full-disk":
        raise OSError(28, "No space left on device", "/some/file")
    if how == "bug":
        raise ZeroDivisionError
    if how == "end":
        os._exit(3)
    print("said by the daemon", flush=True)
    ready({
        "pid": os.getpid(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "open": sorted(map(int, os.listdir("/proc/self/fd"))),
    })
    if how == "fail-later":
        raise QuotaError("Full later.")
    time.sleep(60)
    return 0

try:
    print(json.dumps(background.start(run, log_path=log_path)))
except HpkfsError as error:
    print(json.dumps([type(error).__name__, str(error)]))
    sys.exit(error.exit_code)
"""


def start(how: str, log: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end; its pipes close only when the daemon has let go of them too."""
    return subprocess.run(
        (sys.executable, "-c", START, how, str(log)),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_the_daemon_lets_go_of_who_started_it(tmp_path: Path) -> None:
    done = start("stay", tmp_path / "log")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    watched = os.pidfd_open(told["pid"])
    try:
        assert told["session"] == told["pid"]
        assert told["folder"] == "/"
        # The three of every process, the log, the pipe, and the listing itself.
        assert len(told["open"]) <= 6
        assert (tmp_path / "log").read_text().startswith("said by the daemon")
        assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    finally:
        os.kill(told["pid"], 15)
        assert select.select([watched], [], [], PATIENCE_S)[0]
        os.close(watched)


def test_a_failure_before_it_is_ready_is_told_as_it_is(tmp_path: Path) -> None:
    done = start("quota", tmp_path / "log")
    assert done.returncode == 5
    assert json.loads(done.stdout) == ["QuotaError", "Full. All. Free some."]


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    done = start("full-disk", tmp_path / "log")
    assert done.returncode == 5
    assert json.loads(done.stdout)[1].startswith("/some/file: No space left on device.")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_bug_is_told_in_a_sentence_and_logged_whole(tmp_path: Path) -> None:
    done = start("bug", tmp_path / "log")
    assert (done.returncode, done.stderr) == (1, "")
    assert "ZeroDivisionError" in json.loads(done.stdout)[1]
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_daemon_that_just_ends_is_noticed(tmp_path: Path) -> None:
    done = start("end", tmp_path / "log")
    assert done.returncode == 1
    assert str(tmp_path / "log") in json.loads(done.stdout)[1]


def test_a_failure_after_it_was_ready_is_in_the_log(tmp_path: Path) -> None:
    done = start("fail-later", tmp_path / "log")
    assert done.returncode == 0
    watched = None
    try:
        watched = os.pidfd_open(json.loads(done.stdout)["pid"])
        assert select.select([watched], [], [], PATIENCE_S)[0]
    except ProcessLookupError:
        pass  # it has ended already
    finally:
        if watched is not None:
            os.close(watched)
    assert "Full later." in (tmp_path / "log").read_text()


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"hpkfs-test-{os.getpid()}"
        manager.bind("\0" + name if abstract else "notify")
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else "notify")
        background.notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_without_systemd_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    background.notify_systemd("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nonexistent/socket")
    background.notify_systemd("READY=1")
