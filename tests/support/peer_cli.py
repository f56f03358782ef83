"""The other v2 program's own commands against a homeserver.

It asks for a login at a public relay, which a test cannot approve; so the one function that asks
is replaced by one that returns a grant of the test. The grant goes in by standard input.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.venvs import peer_on_hermes_python

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 600
SCRIPT = """
import sys

import hermes_pubky.cli as cli
import hermes_pubky.onboarding as onboarding

grant = sys.stdin.readline().strip()
cli.authorize = onboarding.authorize = lambda scope: grant
sys.argv[0] = "hermes-pubky"
sys.exit(cli.main())
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """One machine of the other program.

    Attributes:
        root: its state, all of it below here.
        grant: what it may use, as exported text.
    """

    root: Path
    grant: str

    def run(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on the test network; `answer` is typed after it starts."""
        self.root.mkdir(parents=True, exist_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(self.root),
            "HERMES_PUBKY_HOME": str(self.root / "state"),
        }
        return subprocess.run(
            (str(peer_on_hermes_python()), "-I", "-c", SCRIPT, "--network", "testnet", *arguments),
            input=f"{self.grant}\n{answer}",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=env,
            check=False,
        )
