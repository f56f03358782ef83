"""An ordinary user on a machine where the tests run as root: no account is made.

Commands run as `nobody` in a mount namespace of their own. In it `/dev/fuse` is a new node
that everyone may open and `fusermount3` is a copy with the setuid bit, as distributions ship
both; the rest of the machine does not change. The program is installed where `nobody` can
read it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.container import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"
NOBODY = 65534
INSTALL_TIMEOUT_S = 600
TOOLS = ("unshare", "nsenter", "setpriv", "mknod", "fusermount3")
# Runs in the new namespace, as root; $1 is an empty folder, $2 the path of fusermount3.
PREPARE = """
set -e
# A copy of someone's FUSE mount would keep it alive after its end. A container's root may be one.
awk '$3 ~ /^fuse/ && $2 != "/" {print $2}' /proc/self/mounts | while read -r path; do
    umount --lazy "$(printf '%b' "$path")" || true  # it ended meanwhile
done
mount -t tmpfs -o mode=0755,size=1m tmpfs "$1"
mknod -m 0666 "$1/fuse" c 10 229
chmod 0666 "$1/fuse"
mount --bind "$1/fuse" /dev/fuse
cp "$2" "$1/fusermount3"
chown 0:0 "$1/fusermount3"
chmod 4755 "$1/fusermount3"
mount --bind "$1/fusermount3" "$2"
echo ready
exec setpriv --pdeathsig KILL sleep infinity
"""


def missing() -> str:
    """Say what stands in the way of running as another user; empty when nothing does."""
    if os.geteuid() != 0:
        return "only root can run a command as nobody"
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if absent:
        return f"{', '.join(absent)} is missing"
    if not Path(PYTHON).exists():
        return f"{PYTHON} is missing"
    return refused()


@functools.cache
def refused() -> str:
    """Say what the system refuses of the user's namespace, as some containers do; tried once."""
    fusermount = shutil.which("fusermount3")
    if not fusermount:
        return "fusermount3 is missing"
    with tempfile.TemporaryDirectory(prefix="hpkfs-user-") as scratch:
        prepare = PREPARE.partition("echo ready")[0]
        tried = subprocess.run(
            ("unshare", "--mount", "--propagation", "private", "sh", "-c", prepare, "sh", scratch,
             os.path.realpath(fusermount)),
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    said = tried.stderr.strip().partition("\n")[0]
    return f"no namespace for another user can be made: {said}" if tried.returncode else ""


def wheels() -> Path:
    """Return a folder with all that hpkfs needs as wheels, filled on first use."""
    project = ROOT / "pyproject.toml"
    parts = tomllib.loads(project.read_text(encoding="utf-8"))
    needs = [*parts["project"]["dependencies"], *parts["build-system"]["requires"], "wheel"]
    folder = cache_folder() / f"wheels-{zlib.crc32(repr(needs).encode()):08x}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            built = Path(scratch) / "wheels"
            pip = _new_venv(Path(scratch) / "venv") / "bin" / "pip"
            _call(str(pip), "wheel", "--quiet", "--wheel-dir", str(built), *needs)
            built.rename(folder)
    return folder


@contextlib.contextmanager
def shared_venv() -> Iterator[Path]:
    """Install hpkfs, as it is now, into a venv that everyone can read; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="hpkfs-venv-", dir="/tmp") as scratch:
        base = Path(scratch)
        base.chmod(0o755)
        sources = base / "sources"
        sources.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, sources)
        shutil.copytree(
            ROOT / "hpkfs", sources / "hpkfs", ignore=shutil.ignore_patterns("__pycache__")
        )
        venv = _new_venv(base / "venv")
        offline = ("install", "--quiet", "--no-index", "--find-links", str(wheels()))
        pip = str(venv / "bin" / "pip")
        _call(pip, *offline, "setuptools", "wheel")
        _call(pip, *offline, "--no-build-isolation", str(sources))
        yield venv


@dataclass(frozen=True, slots=True)
class Unprivileged:
    """The user: a namespace, a home folder and a PATH that starts with the venv."""

    holder_pid: int
    home: Path
    venv: Path

    def argv(self, *command: str) -> list[str]:
        """Return the command line that runs `command` as the user, in its home."""
        user = f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"
        variables = (
            f"HOME={self.home}",
            f"PATH={self.venv}/bin:/usr/local/bin:/usr/bin:/bin",
            f"XDG_RUNTIME_DIR={self.home}/run",
            f"TMPDIR={self.home}/tmp",
            "LANG=C.UTF-8",
        )
        enter = "nsenter", f"--mount=/proc/{self.holder_pid}/ns/mnt", "setpriv", *user
        return [*enter, "env", "-i", f"--chdir={self.home}", *variables, *command]

    def run(
        self, *command: str, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; with `check` a failure raises, with its output."""
        done = subprocess.run(
            self.argv(*command),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done


@contextlib.contextmanager
def unprivileged(venv: Path) -> Iterator[Unprivileged]:
    """Make the user's namespace and home; at the end everything that runs in it is killed."""
    fusermount = shutil.which("fusermount3")
    assert fusermount
    with tempfile.TemporaryDirectory(prefix="hpkfs-user-", dir="/tmp") as scratch:
        base = Path(scratch)
        base.chmod(0o755)
        (base / "root").mkdir()
        for folder in (base / "home", base / "home" / "run", base / "home" / "tmp"):
            folder.mkdir(mode=0o700)
            os.chown(folder, NOBODY, NOBODY)
        arguments = str(base / "root"), os.path.realpath(fusermount)
        script = "unshare", "--mount", "--propagation", "private", "sh", "-c", PREPARE, "sh"
        holder = subprocess.Popen(
            (*script, *arguments),
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            assert holder.stdout
            try:
                assert holder.stdout.readline() == "ready\n", "the namespace could not be made"
                yield Unprivileged(holder.pid, base / "home", venv)
            finally:
                _kill_namespace(holder.pid)


def _kill_namespace(pid: int) -> None:
    """Kill the process and all others in its mount namespace, so that its mounts end."""
    namespace = _namespace(pid)
    assert namespace != _namespace(os.getpid()), "this would be everyone"
    others = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    for other in others:
        if namespace and _namespace(other) == namespace:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _new_venv(folder: Path) -> Path:
    _call(PYTHON, "-m", "venv", str(folder))
    return folder


def _call(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
