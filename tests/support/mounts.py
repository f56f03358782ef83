"""Real mounts for tests: started and ended as a person does, through the command line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND_TIMEOUT_S = 90
GONE_TIMEOUT_S = 20


class Mount:
    """One store, one state directory, one mountpoint."""

    def __init__(self, store: Path | str, root: Path, *, name: str = "m") -> None:
        self.store = str(store)
        self.state = root / f"{name}-state"
        self.path = root / f"{name}-mount"
        self.runtime = root / "run"
        self.path.mkdir(exist_ok=True)
        self.runtime.mkdir(exist_ok=True)
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "HOME": str(root)}

    def run(
        self, *args: str, check: int | None = 0, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run `hpkfs` with these arguments; `check` is the exit code that is expected."""
        done = subprocess.run(
            [sys.executable, "-m", "hpkfs.cli", *args],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check is not None:
            assert done.returncode == check, (
                f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def mount(self, *options: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Mount; returns when it is ready."""
        return self.run(
            "mount", self.store, str(self.path), "--state-dir", str(self.state), *options,
            check=check,
        )  # fmt: skip

    def umount(self, *options: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Unmount."""
        return self.run("umount", str(self.path), *options, check=check)

    def status(self, *args: str) -> dict[str, Any]:
        """`status --json`, whatever its exit code is."""
        done = self.run("status", str(self.path), "--json", *args, check=None)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pid(self) -> int:
        """The daemon's process id."""
        for file in (self.runtime / "hpkfs").glob("*.json"):
            record = json.loads(file.read_text())
            if record["mountpoint"] == str(self.path):
                return int(record["pid"])
        raise AssertionError(f"{self.path} has no daemon")

    def kill(self) -> None:
        """Kill the daemon with SIGKILL and wait until it is gone."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)

    def is_mounted(self) -> bool:
        """Whether the kernel has a mount there, alive or dead."""
        return any(
            line.split()[4] == str(self.path)
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        )

    def clean(self) -> None:
        """Whatever is left: kill, detach."""
        with contextlib.suppress(AssertionError, ProcessLookupError):
            self.kill()
        while self.is_mounted():
            subprocess.run(["fusermount3", "-uz", str(self.path)], timeout=20, check=True)


@contextlib.contextmanager
def mounted(store: Path | str, root: Path, *options: str, name: str = "m") -> Iterator[Mount]:
    """A mount for the time of a test."""
    mount = Mount(store, root, name=name)
    try:
        mount.mount(*options)
        yield mount
    finally:
        mount.clean()


def wait_gone(pid: int) -> None:
    """Wait until a process that is not our child has ended, all of its threads included.

    Its leader may be a zombie while another thread still holds the mount (pidfd_open(2)).
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([watched], [], [], GONE_TIMEOUT_S)
    finally:
        os.close(watched)
    assert ended, f"process {pid} did not end"


def tree(path: Path) -> dict[str, str]:
    """Digest of every regular file below a folder, by relative path."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                found[str(file.relative_to(path))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found
