"""A clean Debian in a container, to prove that nothing but `./dev` is needed.

The base is a minimal system made by debootstrap, kept as a tarball in the cache directory. How
packages are reached (mirrors, proxies, certificates) is taken from this machine when a
container starts, so none of it is written down anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RELEASE = "bookworm"
IMAGE = "hpkfs-test-base"
BOOTSTRAP_TIMEOUT_S = 900
START_TIMEOUT_S = 120
LIFETIME_S = 3600  # a container that nobody removed ends by itself
APT_SETTINGS = re.compile(r'Acquire::(https?|ftp|Check-|Retries)[^"]*"[^"]*";')
NETWORK_VARIABLES = re.compile(r"(?i)([a-z]+_proxy|.*_ca_bundle|ssl_cert_(file|dir))")
ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """Return our folder for what is slow to make and can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "hpkfs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def missing() -> str:
    """Say what stands in the way of making the base image; empty when nothing does."""
    if (cache_folder() / f"{RELEASE}.tar").exists():
        return ""
    if not shutil.which("debootstrap"):
        return "debootstrap is missing"
    return "" if os.geteuid() == 0 else "debootstrap needs root"


def base_tarball() -> Path:
    """Return the minimal system as a tarball, made on first use (some minutes)."""
    tarball = cache_folder() / f"{RELEASE}.tar"
    if tarball.exists():
        return tarball
    mirror = [source.split()[1] for source in apt_sources() if source.split()[2] == RELEASE][:1]
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        system = Path(scratch) / "system"
        packed = Path(scratch) / "packed.tar"
        _call("debootstrap", "--variant=minbase", RELEASE, str(system), *mirror)
        shutil.rmtree(system / "var/cache/apt/archives")
        _call("tar", "-C", str(system), "--numeric-owner", "-cf", str(packed), ".")
        packed.rename(tarball)
    return tarball


def base_image() -> str:
    """Return the name of the Docker image made from the tarball."""
    tarball = base_tarball()
    with tarball.open("rb") as file:
        image = f"{IMAGE}:{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    if not _call("docker", "image", "ls", "--quiet", image).strip():
        _call("docker", "import", str(tarball), image)
    return image


def apt_sources() -> list[str]:
    """Return this machine's Debian sources of our release, as lines for sources.list."""
    if not shutil.which("apt-get"):
        return []
    fields = "$(ORIGIN)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    lines = _call("apt-get", "indextargets", "--format", fields, "Created-By: Packages")
    found = {line.partition("|")[2] for line in lines.splitlines() if line.startswith("Debian|")}
    return sorted(line for line in found if line.split()[2].startswith(RELEASE))


def apt_settings() -> str:
    """Return this machine's proxies and checks for apt, as an apt.conf."""
    if not shutil.which("apt-config"):
        return ""
    lines = _call("apt-config", "dump").splitlines()
    return "".join(f"{line}\n" for line in lines if APT_SETTINGS.fullmatch(line))


def network_environment() -> dict[str, str]:
    """Return the variables by which pip and others reach the network from here."""
    found = {name: value for name, value in os.environ.items() if NETWORK_VARIABLES.match(name)}
    for line in _call(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2].replace("-", "_").upper()
        found[f"PIP_{option}"] = value.strip("'\"")
    return found


@dataclass(frozen=True, slots=True)
class Container:
    """A running container."""

    id: str

    def run(self, *command: str, cwd: str = "/", timeout_s: float = 60) -> str:
        """Run a command in the container and return what it printed, both streams together."""
        inside = ("timeout", str(timeout_s), *command)  # ends it inside too, not only the client
        done = subprocess.run(
            ("docker", "exec", "--workdir", cwd, self.id, *inside),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s + 20,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Write a file in the container; its folder must exist."""
        subprocess.run(
            ("docker", "exec", "--interactive", self.id, "tee", path),
            input=text,
            text=True,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )

    def copy_in(self, source: Path, target: str) -> None:
        """Copy a file or folder of this machine into the container."""
        _call("docker", "cp", str(source), f"{self.id}:{target}")


@contextlib.contextmanager
def clean_container() -> Iterator[Container]:
    """Start a clean system that may mount FUSE and reaches packages as this machine does."""
    image = base_image()
    options = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--network", "host"]
    if "apparmor" in _call("docker", "info", "--format", "{{.SecurityOptions}}"):
        options += ["--security-opt", "apparmor=unconfined"]
    for number, (name, value) in enumerate(sorted(network_environment().items())):
        if os.path.exists(value):
            inside = f"/run/host/{number}"
            options += ["--volume", f"{os.path.realpath(value)}:{inside}:ro"]
            value = inside
        options += ["--env", f"{name}={value}"]
    start = ("docker", "run", "--detach", "--rm", "--init", *options, image)
    container = Container(
        _call(*start, "sleep", str(LIFETIME_S), timeout_s=START_TIMEOUT_S).strip()
    )
    try:
        if sources := apt_sources():  # else debootstrap's own
            container.write("/etc/apt/sources.list", "".join(f"{line}\n" for line in sources))
        container.write("/etc/apt/apt.conf.d/90host", apt_settings())
        yield container
    finally:
        _call("docker", "rm", "--force", container.id)


def clone_into(container: Container, target: str) -> None:
    """Put a fresh clone of the last commit into the container."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        _call("git", "clone", "--quiet", "--no-local", str(ROOT), str(clone))
        container.copy_in(clone, target)


def _call(*command: str, timeout_s: float = BOOTSTRAP_TIMEOUT_S) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr}"
    return done.stdout
