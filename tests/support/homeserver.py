"""A Pubky network of the test's own: PostgreSQL, a DHT, relays, a homeserver, users with a signer.

Everything is real but the way in to the homeserver: its TLS is ended by `hpkfs-testnet`, so that
`FaultProxy` can stand behind it. The ports are those that the SDK expects of a test network, so
there is one at a time on a machine (or in a network namespace).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.container import cache_folder
from support.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
RELAY = "http://127.0.0.1:15412/inbox/"
HOMESERVER_PORT = 6286
ADMIN = "http://127.0.0.1:6288"
BUILD_TIMEOUT_S = 1_800
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 20
ANSWER_TIMEOUT_S = 60
RUST_MINOR_MIN = 91
CLIENT_ID = "hermes.pubky.app"

CONFIG = """\
[general]
signup_mode = "open"
database_url = "{database_url}"

[drive]
pubky_listen_socket = "127.0.0.1:6287"
icann_listen_socket = "127.0.0.1:6286"
rate_limits = []

[storage]
type = "file_system"

[admin]
enabled = true
listen_socket = "127.0.0.1:6288"
admin_password = "admin"

[metrics]
enabled = false

[pkdns]
public_ip = "127.0.0.1"
public_pubky_tls_port = 6297
dht_bootstrap_nodes = ["127.0.0.1:6881"]
dht_relay_nodes = ["http://127.0.0.1:15411"]

[logging]
level = "warn"
module_levels = []
"""


def missing() -> str:
    """Say what a homeserver of the tests lacks on this machine; empty when nothing."""
    try:
        version = subprocess.run(
            ("cargo", "--version"), capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "cargo is missing"
    found = re.match(r"cargo 1\.(\d+)\.", version)
    if found is None or int(found[1]) < RUST_MINOR_MIN:
        return f"cargo is older than 1.{RUST_MINOR_MIN}"
    if not _postgresql():
        return "PostgreSQL is missing"
    if not _unprivileged():
        return "there is no ordinary user to run PostgreSQL"
    return ""


def target_folder() -> Path:
    """Where compiled Rust is kept."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or cache_folder() / "target")


def build() -> Path:
    """Compile the network, unless it is; its program. One process at a time."""
    folder = target_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ("cargo", "build", "--quiet", "--locked", "--workspace"),
            cwd=ROOT,
            env={**os.environ, "CARGO_TARGET_DIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the test network cannot be compiled:\n{done.stderr}")
    return folder / "debug" / "hpkfs-testnet"


def _postgresql() -> str:
    """The folder of the newest PostgreSQL's programs."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
    return found[-1] if found else ""


def _unprivileged() -> pwd.struct_passwd | None:
    """Whom PostgreSQL runs as: it refuses root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


class EndedError(RuntimeError):
    """A program of the network has ended."""


class Process:
    """A program that says when it is ready and ends when its standard input does."""

    def __init__(self, *command: str, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._log = log
        self._lock = threading.Lock()
        self._killer = threading.Timer(START_TIMEOUT_S, self._process.kill)
        self._killer.start()
        try:
            self._read()
        except BaseException:
            self.kill()
            raise
        finally:
            self._killer.cancel()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: object) -> dict[str, str]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        with self._lock:
            killer = threading.Timer(ANSWER_TIMEOUT_S, self._process.kill)
            killer.start()
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                answer = json.loads(self._read())
            finally:
                killer.cancel()
        if "error" in answer:
            raise RuntimeError(f"{request['op']}: {answer['error']}")
        assert isinstance(answer, dict)
        return answer

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(STOP_TIMEOUT_S)
            raise EndedError(f"it has ended with {code}:\n{self._log.read_text()[-2000:]}")
        return line

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._close()

    def stop(self) -> None:
        """Let it end by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait(STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Homeserver:
    """The homeserver alone: it can stop, die, and come back with its data."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self.folder = folder
        self._process: Process | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self._process is None, "it runs already"
        self._process = Process(
            str(self._program), "homeserver", str(self.folder), log=self.folder / "log"
        )

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        assert self._process is not None, "it does not run"
        self._process.kill()
        self._process = None

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            self._process.stop()
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def pause(self) -> None:
        """Let it hang: connections are taken, nothing is answered."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class User:
    """Someone with an account on the homeserver.

    Attributes:
        owner: the public key, z-base-32.
    """

    owner: str
    network: Process

    def uri(self, agent_id: str = "default") -> str:
        """The address of an agent of theirs."""
        return f"pubky://{self.owner}/priv/hermes.pubky.app/v2/agents/{agent_id}/head.json"

    def template_uri(self, template_id: str = "default") -> str:
        """The address of a public template of theirs."""
        return f"pubky://{self.owner}/pub/hermes.pubky.app/v2/templates/{template_id}/head.json"

    def approve(self, url: str, capabilities: str | None = None) -> None:
        """Approve a request for a grant, as the signer app does; it may narrow what is asked."""
        self.network.ask(op="approve", owner=self.owner, url=url, capabilities=capabilities)

    def grant(self, capabilities: str) -> str:
        """A new grant, by the real flow, as exported text."""
        return self.network.ask(op="grant", owner=self.owner, capabilities=capabilities)["grant"]

    def agent_grant(self, agent_id: str = "default", actions: str = "rw") -> str:
        """A new grant for one agent."""
        return self.grant(f"/priv/{CLIENT_ID}/v2/agents/{agent_id}/:{actions}")

    def revoke_all(self) -> None:
        """Revoke every grant."""
        self.network.ask(op="revoke-all", owner=self.owner)

    def set_quota(self, megabytes: int | None) -> None:
        """Bound what they may store; None for no bound."""
        self._patch({"storage_quota_mb": "unlimited" if megabytes is None else megabytes})

    def set_rate(self, *, read: str | None = None, write: str | None = None) -> None:
        """Slow them down, as `100kb/s`; None for full speed."""
        self._patch({"rate_read": read or "unlimited", "rate_write": write or "unlimited"})

    def _patch(self, fields: dict[str, object]) -> None:
        request = urllib.request.Request(
            f"{ADMIN}/users/{self.owner}/quota",
            data=json.dumps(fields).encode(),
            headers={"X-Admin-Password": "admin", "Content-Type": "application/json"},
            method="PATCH",
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S):
            pass


class Testnet:
    """The whole network; made by `testnet`."""

    __test__ = False
    relay = RELAY

    def __init__(self, start: Callable[[], Process], homeserver: Homeserver) -> None:
        self._start = start
        self._network = start()
        self.homeserver = homeserver
        self.environment = {"HERMES_PUBKY_TESTNET": "1", "HPKFS_RELAY": RELAY}

    def new_user(self) -> User:
        """Sign someone up; a network that hangs or has ended is started again."""
        try:
            owner = self._network.ask(op="new-user")["owner"]
        except (EndedError, BrokenPipeError):
            self._network.kill()
            self.homeserver.stop()
            self._network = self._start()
            self.homeserver.start()
            owner = self._network.ask(op="new-user")["owner"]
        return User(owner, self._network)

    def stop(self) -> None:
        """End it all."""
        self.homeserver.stop()
        self._network.stop()

    def owner_folder(self, user: User) -> Path:
        """Where the homeserver keeps a user's files."""
        return self.homeserver.folder / "data" / "files" / user.owner

    def agent_folder(self, user: User, agent_id: str = "default") -> Path:
        """Where the homeserver keeps an agent: the store as a directory, to be looked at."""
        return self.owner_folder(user) / "priv" / CLIENT_ID / "v2" / "agents" / agent_id

    @contextlib.contextmanager
    def proxy(self) -> Iterator[FaultProxy]:
        """Lead all requests through a proxy, for as long as it is open."""
        with FaultProxy(HOMESERVER_PORT) as proxy:
            self._network.ask(op="door", port=proxy.port)
            try:
                yield proxy
            finally:
                self._network.ask(op="door", port=HOMESERVER_PORT)


@contextlib.contextmanager
def testnet(folder: Path) -> Iterator[Testnet]:
    """A running network; everything of it is gone afterwards.

    Args:
        folder: an empty folder for its data.
    """
    program = build()
    with contextlib.ExitStack() as stack:
        database_url = stack.enter_context(_database(folder / "postgresql"))
        data = folder / "homeserver"
        data.mkdir()
        (data / "config.toml").write_text(CONFIG.format(database_url=database_url))
        (data / "secret").write_text("0" * 64)  # the key that the way in has, too
        (data / "secret").chmod(0o600)

        def start() -> Process:
            return Process(str(program), "network", log=folder / "network.log")

        running = Testnet(start, Homeserver(program, data))
        stack.callback(running.stop)
        running.homeserver.start()
        yield running


@contextlib.contextmanager
def _database(folder: Path) -> Iterator[str]:
    """A PostgreSQL of our own; the address of an empty database."""
    user = _unprivileged()
    assert user is not None, "see `missing`"
    folder.mkdir()
    binaries = _postgresql()
    # PostgreSQL refuses root, and an ordinary user cannot enter pytest's folders.
    place = Path(f"/tmp/hpkfs-postgresql-{os.getpid()}")
    place.mkdir(mode=0o700)
    os.chown(place, user.pw_uid, user.pw_gid)
    try:
        run = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        run = run if os.getuid() == 0 else []
        data = place / "data"
        _call(
            *run, f"{binaries}/initdb", "--pgdata", str(data), "--auth=trust", "--no-sync",
            "--username=postgres", "--encoding=UTF8", "--locale=C",
        )  # fmt: skip
        port = _free_port()
        # Nothing in it outlives the tests, so nothing need be flushed.
        settings = (
            f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={place}"
            " -c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=60"
        )
        control = (*run, f"{binaries}/pg_ctl", "--pgdata", str(data), "--wait", "--timeout=60")
        _call(*control, "--log", str(place / "log"), "--options", settings, "start")
        try:
            _call(*run, f"{binaries}/createdb", "-h", "127.0.0.1", "-p", str(port),
                  "-U", "postgres", "hpkfs")  # fmt: skip
            yield f"postgres://postgres@127.0.0.1:{port}/hpkfs"
        finally:
            _call(*control, "--mode=immediate", "stop")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _call(*command: str) -> None:
    # A server that stays must not hold our pipes.
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if command[-1] != "start" else subprocess.DEVNULL,
        cwd="/",
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or b'').decode()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


def wait_until(condition: object, *, timeout_s: float = 30.0) -> None:
    """Poll until `condition()` is true."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)
