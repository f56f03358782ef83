"""pjdfstest, a suite of POSIX system calls, built once into our cache folder."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING

from support.container import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "0.2.2"
BUILD_TIMEOUT_S = 900
RUN_TIMEOUT_S = 180
CLOCK_TICK_S = 0.01  # of the slowest kernels; times in a mount are as fine as the kernel's clock
USERS = (("nobody", "nogroup"), ("daemon", "daemon"), ("bin", "bin"))
FEATURES = ("rename_ctime", "utimensat", "utime_now", "posix_fallocate")


def missing() -> str:
    """Say what stands in the way; empty when nothing does."""
    if os.geteuid() != 0:
        return "only root can act as other users"
    try:
        for user, group in USERS:
            pwd.getpwnam(user)
            grp.getgrnam(group)
    except KeyError as error:
        return f"a user or group that pjdfstest acts as is missing: {error}"
    if not _binary().exists() and not shutil.which("cargo"):
        return "cargo is missing, which builds pjdfstest"
    return ""


def run(folder: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run the suite in a folder that every user can reach; its configuration goes to `scratch`."""
    users = ", ".join(f'["{user}", "{group}"]' for user, group in USERS)
    features = "\n".join(f"{name} = {{}}" for name in FEATURES)
    configuration = scratch / "pjdfstest.toml"
    configuration.write_text(
        f"[features]\n{features}\n[settings]\nnaptime = {CLOCK_TICK_S}\nallow_remount = false\n"
        f"[dummy_auth]\nentries = [{users}]\n",
        encoding="utf-8",
    )
    return subprocess.run(
        (_build(), "--configuration-file", str(configuration), "--path", str(folder)),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )


def _binary() -> Path:
    return cache_folder() / "pjdfstest" / "bin" / "pjdfstest"


def _build() -> str:
    """Return the program's path; the first call builds it."""
    if not _binary().exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as target:
            root = str(_binary().parents[1])
            done = subprocess.run(
                ("cargo", "install", "pjdfstest", "--version", VERSION, "--root", root),
                env={**os.environ, "CARGO_TARGET_DIR": target},
                capture_output=True,
                text=True,
                check=False,
                timeout=BUILD_TIMEOUT_S,
            )
            assert done.returncode == 0, done.stderr
    return str(_binary())
