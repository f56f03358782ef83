"""The real Hermes 0.19.0, run in a home and a workspace of the test's choice, without a network.

Whoever calls needs the marker `hermes`. Nothing outside the home, the workspace and the folder
beside the home is read or written: HOME points there, and the only server is the fake model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.fake_model import MODEL, Answer, Call, FakeModel
from support.venvs import hermes_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.fake_model import Script

QUERY_TIMEOUT_S = 120
DATABASE = "state.db"
SESSION_LINE = re.compile(r"^session_id: *(\S+)", re.MULTILINE)
DEAD_PROXY = "http://127.0.0.1:9"  # refuses at once: whatever is not local fails, and quickly

SKILL = """---
name: greeting
description: How to greet people by name
---

# Greeting

Say good morning, and then the name.
"""
FACT = "The user's name is Ada."
NOTE = "Ada asked for this note.\n"

# What users say in tests, and what the model does then. The keys are the messages themselves.
REMEMBER = "Please remember that my name is Ada."
MAKE_SKILL = "Make a skill of how to greet people."
VIEW_SKILL = "Look at how to greet people."
WRITE_NOTE = "Write a note for me."
READ_NOTE = "Read me the note."
RUN_COMMAND = "Count to three in a file."
DO_ALL = "Do all that you can."
ASK_AGAIN = "What did I tell you?"
THINK = "Think about this for a long time."

_REMEMBER = Call("memory", {"action": "add", "target": "user", "content": FACT})
_MAKE_SKILL = Call("skill_manage", {"action": "create", "name": "greeting", "content": SKILL})
_VIEW_SKILL = Call("skill_view", {"name": "greeting"})
_WRITE_NOTE = Call("write_file", {"path": "notes/note.md", "content": NOTE})
_READ_NOTE = Call("read_file", {"path": "notes/note.md"})
_RUN_COMMAND = Call("terminal", {"command": "seq 3 > counted.txt && cat counted.txt"})

SCRIPT: Script = {
    REMEMBER: (Answer(calls=(_REMEMBER,)), Answer("I will remember that you are Ada.")),
    MAKE_SKILL: (Answer(calls=(_MAKE_SKILL,)), Answer("Now I know how to greet.")),
    VIEW_SKILL: (Answer(calls=(_VIEW_SKILL,)), Answer("Good morning, Ada.")),
    WRITE_NOTE: (Answer(calls=(_WRITE_NOTE,)), Answer("The note is written.")),
    READ_NOTE: (Answer(calls=(_READ_NOTE,)), Answer("I have read the note.")),
    RUN_COMMAND: (Answer(calls=(_RUN_COMMAND,)), Answer("One, two, three.")),
    DO_ALL: (
        Answer("First I remember.", calls=(_REMEMBER, _MAKE_SKILL)),
        Answer(calls=(_VIEW_SKILL, _WRITE_NOTE)),
        Answer(calls=(_READ_NOTE, _RUN_COMMAND)),
        Answer("All is done."),
    ),
    ASK_AGAIN: (Answer("You told me that your name is Ada."),),
    THINK: (Answer("Well, let me think about it.", held=True),),
}


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of Hermes ended. `session_id` is empty when it had no conversation."""

    rc: int
    stdout: str
    stderr: str
    session_id: str


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation in the database, with its messages as (role, content)."""

    id: str
    source: str
    cwd: str | None
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RealHome:
    """A home as a user has it, for an import; see `make_real_home`."""

    home: Path
    workspace: Path
    sessions: tuple[str, ...]
    secrets: tuple[str, ...]  # texts that must never leave this machine


def make_home(path: Path, model_port: int) -> Path:
    """Make a Hermes home that knows the fake model and nothing else; a second call renews it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config(model_port))
    return path


def config(model_port: int) -> str:
    return (
        "model:\n"
        f"  default: {MODEL}\n"
        "  provider: custom\n"
        f"  base_url: http://127.0.0.1:{model_port}/v1\n"
    )


def query_argv(text: str, *, resume: str | None = None, oneshot: bool = False) -> tuple[str, ...]:
    """Return the command line of one query. One-shot runs cannot resume: Hermes ignores it."""
    program = (str(hermes_python()), "-m", "hermes_cli.main")
    if oneshot:
        assert resume is None, "Hermes starts a new conversation for a one-shot run"
        return (*program, "--no-restore-cwd", "-z", text)
    session = ("--resume", resume) if resume else ()
    return (*program, "chat", "--no-restore-cwd", *session, "-Q", "-q", text)


def environment(
    home: Path, workspace: Path, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the child's whole environment; nothing but PATH comes from ours."""
    user_home = home.parent / f"{home.name}-user"
    user_home.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(user_home),
        "HERMES_HOME": str(home),
        "TERMINAL_CWD": str(workspace),
        "HERMES_DISABLE_LAZY_INSTALLS": "1",
        "http_proxy": DEAD_PROXY,
        "https_proxy": DEAD_PROXY,
        "no_proxy": "127.0.0.1,localhost",
        **(env or {}),
    }


def start_query(
    home: Path,
    text: str,
    *,
    cwd: Path,
    resume: str | None = None,
    oneshot: bool = False,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start one query in a process group of its own, for a test that ends it in the middle."""
    return subprocess.Popen(
        query_argv(text, resume=resume, oneshot=oneshot),
        cwd=cwd,
        env=environment(home, cwd, env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_query(
    home: Path,
    text: str,
    *,
    cwd: Path,
    resume: str | None = None,
    oneshot: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = QUERY_TIMEOUT_S,
) -> Run:
    """Run one query to its end in the workspace `cwd`.

    Raises TimeoutExpired when it takes too long; nothing is left running then.
    """
    with start_query(home, text, cwd=cwd, resume=resume, oneshot=oneshot, env=env) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            kill_group(process)
            raise
    told = SESSION_LINE.search(stderr)
    if told:
        session = told[1]
    else:
        known = sessions(home)
        session = known[-1].id if known else ""
    return Run(process.returncode, stdout, stderr, session)


def kill_group(process: subprocess.Popen[str]) -> None:
    """End the program and what it started with SIGKILL, and take its exit status."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.communicate()


def sessions(home: Path) -> list[Session]:
    """Return the conversations in the home's database, oldest first.

    Reads a copy of the database and its write-ahead log, so the home is not disturbed.
    """
    if not (home / DATABASE).exists():
        return []
    with tempfile.TemporaryDirectory() as scratch:
        for suffix in ("", "-wal", "-journal"):
            if (home / (DATABASE + suffix)).exists():
                shutil.copyfile(home / (DATABASE + suffix), Path(scratch) / (DATABASE + suffix))
        with closing(sqlite3.connect(Path(scratch) / DATABASE)) as database:
            rows = database.execute("SELECT id, source, cwd FROM sessions ORDER BY started_at, id")
            return [
                Session(id, source, cwd, _messages(database, id))
                for id, source, cwd in rows.fetchall()
            ]


def _messages(database: sqlite3.Connection, session: str) -> tuple[tuple[str, str], ...]:
    rows = database.execute(
        "SELECT role, content FROM messages WHERE session_id = ? ORDER BY id", (session,)
    )
    return tuple((role, content or "") for role, content in rows)


def make_real_home(path: Path) -> RealHome:
    """Make `path/home` and `path/workspace` by real runs: two conversations, one of them resumed.

    The model wrote a memory, a skill and files; there are a plugin, a scheduled job, keys, a
    virtual environment and the write-ahead log that Hermes leaves behind.
    """
    home, workspace = path / "home", path / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "AGENTS.md").write_text("# Rules\n\nBe brief.\n")
    with FakeModel(SCRIPT) as model:
        make_home(home, model.port)
        _add_plugin(home)
        _add_secrets(home)
        first = run_query(home, DO_ALL, cwd=workspace)
        second = run_query(home, WRITE_NOTE, cwd=workspace)
        third = run_query(home, ASK_AGAIN, cwd=workspace, resume=first.session_id)
        _add_job(home, workspace)
    assert [run.rc for run in (first, second, third)] == [0, 0, 0], (first, second, third)
    _add_tree(home / "hermes-agent" / "venv")
    _add_tree(workspace / ".venv")
    return RealHome(home, workspace, (first.session_id, second.session_id), SECRETS)


SECRETS = ("sk-fake-0123456789abcdef", "refresh-fake-fedcba9876543210")


def _add_secrets(home: Path) -> None:
    # No provider in auth.json is one that Hermes would sign in to.
    (home / ".env").write_text(f"SOME_SERVICE_API_KEY={SECRETS[0]}\n")
    auth = {"version": 1, "providers": {"some-service": {"refresh_token": SECRETS[1]}}}
    (home / "auth.json").write_text(json.dumps(auth))
    for name in (".env", "auth.json"):
        (home / name).chmod(0o600)


def _add_plugin(home: Path) -> None:
    plugin = home / "plugins" / "counter"
    plugin.mkdir(parents=True)
    (plugin / "plugin.yaml").write_text(
        "name: counter\nversion: 1.0.0\ndescription: Counts turns\nkind: standalone\n"
    )
    (plugin / "__init__.py").write_text(
        "from pathlib import Path\n\n\n"
        "def register(ctx):\n"
        "    ctx.register_hook('post_llm_call', count)\n\n\n"
        "def count(**_):\n"
        "    with (Path(__file__).parent / 'turns').open('a') as file:\n"
        "        file.write('turn\\n')\n"
    )
    with (home / "config.yaml").open("a") as config_file:
        config_file.write("plugins:\n  enabled: [counter]\n")


def _add_job(home: Path, workspace: Path) -> None:
    program = (str(hermes_python()), "-m", "hermes_cli.main")
    subprocess.run(
        (*program, "cron", "create", "every 2h", "Say good morning."),
        cwd=workspace,
        env=environment(home, workspace),
        capture_output=True,
        timeout=QUERY_TIMEOUT_S,
        check=True,
    )


def _add_tree(venv: Path) -> None:
    """Make what a virtual environment looks like: links, many small files, bytecode."""
    packages = venv / "lib" / "python3.11" / "site-packages"
    for name in ("alpha", "beta", "gamma"):
        (packages / name / "__pycache__").mkdir(parents=True)
        (packages / name / "__init__.py").write_text(f"NAME = {name!r}\n")
        (packages / name / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"\0" * 64)
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (venv / "lib64").symlink_to("lib")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to("/usr/bin/python3")
