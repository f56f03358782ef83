"""A machine of a homeserver's user: a state directory, a grant of its own, a mount."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from support.homeserver import RELAY
from support.mounts import Mount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.homeserver import User

LOGIN_TIMEOUT_S = 60
STATE_TIMEOUT_S = 60


class Machine(Mount):
    """A mount of an agent on a homeserver."""

    def __init__(self, user: User, root: Path, *, name: str = "m") -> None:
        super().__init__(user.uri(), root, name=name)
        self.user = user
        self.env |= {"HERMES_PUBKY_TESTNET": "1", "HPKFS_RELAY": RELAY}

    @property
    def grant_file(self) -> Path:
        return self.state / "credentials.env"

    def grant(self) -> str:
        return self.grant_file.read_text().partition("=")[2].strip()

    def login(
        self, *args: str, capabilities: str | None = None, approver: User | None = None
    ) -> tuple[int, str]:
        """Log in, approved by the signer: the exit code and all that was printed."""
        command = (sys.executable, "-m", "hpkfs.cli", "login", self.store)
        with subprocess.Popen(
            (*command, "--state-dir", str(self.state), *args),
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if found := re.fullmatch(r"(pubkyauth://\S+)\n", line):
                    (approver or self.user).approve(found[1], capabilities)
            code = process.wait(LOGIN_TIMEOUT_S)
        return code, printed

    def logged_in(self) -> Machine:
        """Log in by a grant that was approved elsewhere: faster, and the same file."""
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.grant_file.touch(0o600)
        self.grant_file.write_text(f"HERMES_PUBKY_GRANT_SECRET={self.user.agent_grant()}\n")
        return self

    def wait_for(self, *states: str) -> dict[str, Any]:
        """Wait until the mount has one of these states; what `status` tells then."""
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while (told := self.status())["state"] not in states:
            assert time.monotonic() < deadline, told
            time.sleep(0.2)
        return told

    def init(self, *args: str) -> None:
        """Make a new agent."""
        self.run("init", self.store, "--state-dir", str(self.state), *args)

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """Start `hpkfs` with these arguments."""
        return subprocess.Popen(
            (sys.executable, "-m", "hpkfs.cli", *args),
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def told(self, command: str, *args: str, check: int | None = None) -> dict[str, Any]:
        """What a command prints as JSON about the address, whatever its exit code is."""
        options = ("--state-dir", str(self.state), "--json")
        done = self.run(command, self.store, *args, *options, check=check)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextlib.contextmanager
def machine(user: User, root: Path, *options: str, name: str = "m") -> Iterator[Machine]:
    """A logged-in machine with the agent mounted, for the time of a test; `m` makes the agent."""
    made = Machine(user, root, name=name).logged_in()
    try:
        if name == "m":
            made.init()
        made.mount(*options)
        yield made
    finally:
        made.clean()
