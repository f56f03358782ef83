"""Can this machine mount? Each finding with its remedy.

`hpkfs doctor` prints what `examine` finds. Nothing is mounted or changed. What a check looks at
comes in as an argument, so that tests can show it another machine.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hpkfs import places
from hpkfs.errors import HpkfsError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICE: Final = "/dev/fuse"
FUSE_CONF: Final = "/etc/fuse.conf"
PYTHON_MIN: Final = (3, 11)
PYTHON_END: Final = (3, 14)
SQLITE_MIN: Final = (3, 35, 0)
# The library's file names: up to 3.16, and from 3.17 on.
LIBFUSE_NAMES: Final = ("libfuse3.so.3", "libfuse3.so.4")
CONTAINER_MARKS: Final = ("/.dockerenv", "/run/.containerenv")
# Major 10, minor 229 (Documentation/admin-guide/devices.txt of the kernel).
FUSE_DEVICE: Final = os.makedev(10, 229)
CONTAINER_REMEDY: Final = (
    "In a container: start it with --device /dev/fuse --cap-add SYS_ADMIN, and where AppArmor is "
    "active with --security-opt apparmor=unconfined."
)
CAP_SYS_ADMIN: Final = 21
ROOT_ID: Final = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        name: what was checked.
        ok: whether mounting can work.
        detail: what was found, as a phrase.
        remedy: what to do; with `ok`, only for those who want the option named in it.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run every check on this machine."""
    is_root = os.geteuid() == ROOT_ID
    in_container = is_container(CONTAINER_MARKS, os.environ)
    findings = [
        check_python(sys.version_info[:3]),
        check_libfuse(),
        check_device(DEVICE, in_container=in_container),
        check_fusermount(shutil.which("fusermount3"), is_root=is_root),
    ]
    if is_root:
        findings.append(check_capability(_read("/proc/self/status"), in_container=in_container))
    else:
        findings.append(check_allow_other(_read(FUSE_CONF)))
    return [*findings, check_sqlite(), check_state(places.home()), check_runtime()]


def examine_mount(*, allow_other: bool) -> list[Finding]:
    """Run the quick checks of what every mount needs.

    Args:
        allow_other: whether the mount shall let other users in.
    """
    is_root = os.geteuid() == ROOT_ID
    findings = [
        check_device(DEVICE, in_container=is_container(CONTAINER_MARKS, os.environ)),
        check_fusermount(shutil.which("fusermount3"), is_root=is_root),
    ]
    if allow_other and not is_root:
        finding = check_allow_other(_read(FUSE_CONF))
        findings.append(replace(finding, ok=not finding.remedy))
    return findings


def is_container(marks: tuple[str, ...], environment: Mapping[str, str]) -> bool:
    """Tell whether this looks like the inside of a container."""
    return "container" in environment or any(os.path.exists(mark) for mark in marks)


def check_python(version: tuple[int, ...]) -> Finding:
    """Check the interpreter's version."""
    text = ".".join(map(str, version))
    if PYTHON_MIN <= version[:2] < PYTHON_END:
        return Finding("python", ok=True, detail=f"Python {text}")
    return Finding(
        "python", ok=False, detail=f"Python {text}", remedy="Use Python 3.11, 3.12 or 3.13."
    )


def check_libfuse(names: tuple[str, ...] = LIBFUSE_NAMES) -> Finding:
    """Check the FUSE library, and the Python package that binds it."""
    import importlib.metadata  # here and below: only `doctor` needs it, and start-up time counts
    import importlib.util

    version = _libfuse_version(names)
    if version is None:
        return Finding(
            "libfuse",
            ok=False,
            detail="the library libfuse 3 is missing",
            remedy="Install it; on Debian and Ubuntu: apt-get install libfuse3-3 fuse3.",
        )
    if importlib.util.find_spec("pyfuse3") is None:
        return Finding(
            "libfuse",
            ok=False,
            detail=f"libfuse {version} is there, the Python package pyfuse3 is missing",
            remedy="Install hpkfs again with pip; pyfuse3 needs libfuse3-dev, pkg-config and gcc.",
        )
    binding = importlib.metadata.version("pyfuse3")
    return Finding("libfuse", ok=True, detail=f"libfuse {version}, pyfuse3 {binding}")


def _libfuse_version(names: tuple[str, ...]) -> str | None:
    import ctypes

    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        number = int(library.fuse_version())
        return f"{number // 100}.{number % 100}" if number >= 300 else str(number)
    return None


def check_device(path: str, *, in_container: bool) -> Finding:
    """Check that the kernel's device is there and can be opened."""
    remedy = CONTAINER_REMEDY if in_container else "Load the kernel's module: modprobe fuse."
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(fd)
        is_device = stat.S_ISCHR(found.st_mode) and found.st_rdev == FUSE_DEVICE
        os.close(fd)
    except FileNotFoundError:
        return Finding("device", ok=False, detail=f"{path} is missing", remedy=remedy)
    except PermissionError as error:
        if error.errno == errno.EACCES:
            remedy = f"Let your user open it, as distributions do: chmod 0666 {path} (as root)."
        return Finding(
            "device", ok=False, detail=f"{path} may not be opened by this user", remedy=remedy
        )
    except OSError as error:
        detail = f"{path} cannot be opened: {os.strerror(error.errno or errno.EIO)}"
        return Finding("device", ok=False, detail=detail, remedy=remedy)
    if not is_device:  # a container may have hidden it behind an empty file
        return Finding("device", ok=False, detail=f"{path} is no device of FUSE", remedy=remedy)
    return Finding("device", ok=True, detail=f"{path} can be opened")


def check_fusermount(path: str | None, *, is_root: bool) -> Finding:
    """Check the helper that mounts for ordinary users, and unmounts for all."""
    install = "Install it; on Debian and Ubuntu: apt-get install fuse3."
    if path is None:
        return Finding("fusermount3", ok=False, detail="fusermount3 is missing", remedy=install)
    found = os.stat(path)
    if is_root or (found.st_uid == ROOT_ID and found.st_mode & stat.S_ISUID):
        return Finding("fusermount3", ok=True, detail=path)
    return Finding(
        "fusermount3",
        ok=False,
        detail=f"{path} does not run as root, so an ordinary user cannot mount",
        remedy=f"As root: chown root {path} && chmod u+s {path}.",
    )


def check_allow_other(fuse_conf: str) -> Finding:
    """Check whether an ordinary user may let other users into a mount. Not needed to mount."""
    if any(line.strip() == "user_allow_other" for line in fuse_conf.splitlines()):
        return Finding("allow_other", ok=True, detail="the option allow_other may be used")
    return Finding(
        "allow_other",
        ok=True,
        detail="the option allow_other is for root only here",
        remedy=f"To use -o allow_other: put the line user_allow_other into {FUSE_CONF}.",
    )


def check_capability(process_status: str, *, in_container: bool) -> Finding:
    """Check that root may mount; in a container it often may not."""
    line = next(
        (line for line in process_status.splitlines() if line.startswith("CapEff:")), "CapEff: 0"
    )
    if int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1:
        return Finding("permission", ok=True, detail="root may mount")
    return Finding(
        "permission",
        ok=False,
        detail="root may not mount here (no CAP_SYS_ADMIN)",
        remedy=CONTAINER_REMEDY if in_container else "Run as an ordinary user, or as full root.",
    )


def check_sqlite() -> Finding:
    """Check the version of SQLite that Python brings."""
    import sqlite3

    detail = f"SQLite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info >= SQLITE_MIN:
        return Finding("sqlite", ok=True, detail=detail)
    needed = ".".join(map(str, SQLITE_MIN))
    return Finding(
        "sqlite", ok=False, detail=detail, remedy=f"Use a Python with SQLite {needed} or newer."
    )


def check_state(home: str) -> Finding:
    """Check that state directories can be made."""
    folder = home
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return Finding("state", ok=True, detail=f"{home} can be written to")
    return Finding(
        "state",
        ok=False,
        detail=f"{home} cannot be made or written to, because of {folder}",
        remedy=f"Make it writable for you, or set {places.HOME_VARIABLE} to another folder.",
    )


def check_runtime() -> Finding:
    """Check the folder of the control sockets."""
    try:
        return Finding("sockets", ok=True, detail=places.runtime_dir())
    except HpkfsError as error:
        return Finding("sockets", ok=False, detail=error.happened, remedy=error.next_step)
    except OSError as error:
        return Finding(
            "sockets",
            ok=False,
            detail=f"the folder of the control sockets cannot be made: {error}",
            remedy="Set XDG_RUNTIME_DIR to a folder of yours.",
        )


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
