"""Virtual environments with the real programs, made once and kept in the cache folder.

A venv cannot be moved, so it is built in its place, under a lock, and a marker file is written
last: what an interrupted build left behind has no marker and is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from support.container import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYSTEM_PYTHON = "/usr/bin/python3"
BUILD_TIMEOUT_S = 900
PROBE_TIMEOUT_S = 30
MARKER = "complete"


@dataclass(frozen=True, slots=True)
class Venv:
    """A venv with these packages and what they need, below the cache folder."""

    name: str
    requirements: tuple[str, ...]


HERMES = Venv("hermes-0.19.0", ("hermes-agent==0.19.0",))
PEER = Venv("peer-0.2.1", ("hermes-pubky==0.2.1",))
PEER_ON_HERMES = Venv("peer-0.2.1-on-hermes", (*PEER.requirements, *HERMES.requirements))


def hermes_python() -> Path:
    """Return the interpreter of a venv with Hermes 0.19.0, made on first use (half a minute)."""
    return python_of(HERMES)


def peer_python() -> Path:
    """Return the interpreter of a venv with the other v2 program, made on first use.

    It has no Hermes: what reads and rebuilds a checkpoint does without.
    """
    return python_of(PEER)


def peer_on_hermes_python() -> Path:
    """Return the interpreter of a venv with the other v2 program and its Hermes."""
    return python_of(PEER_ON_HERMES)


def is_made(venv: Venv) -> bool:
    """Tell whether the venv is there, so that no package index is needed."""
    try:
        return (_folder(venv) / MARKER).read_text() == _marker(venv)
    except FileNotFoundError:
        return False


def python_of(venv: Venv) -> Path:
    """Return the interpreter of the venv; make it where it is missing."""
    if not is_made(venv):
        with _locked(cache_folder() / f"{venv.name}.lock"):
            if not is_made(venv):  # re-check: another process had the lock
                _make(venv)
    return _folder(venv) / "bin" / "python"


def _make(venv: Venv) -> None:
    folder = _folder(venv)
    if folder.exists():
        shutil.rmtree(folder)
    _call(_base_python(), "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    _call(*pip, "install", "--quiet", "--disable-pip-version-check", *venv.requirements)
    (folder / MARKER).write_text(_marker(venv))


def _folder(venv: Venv) -> Path:
    return cache_folder() / venv.name


def _marker(venv: Venv) -> str:
    """Name all that the venv depends on: another interpreter or release makes it anew."""
    return "\n".join((_base_python(), *venv.requirements, ""))


@cache
def _base_python() -> str:
    """Return Debian's Python where it is new enough and can make a venv, else our own."""
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run(
            (SYSTEM_PYTHON, "-c", probe), capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return sys.executable
    return SYSTEM_PYTHON if done.returncode == 0 else sys.executable


def _call(*command: str) -> None:
    # A caller's PYTHON* settings must not leak into what is installed for good.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; a killed holder frees it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
