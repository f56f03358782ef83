"""The support for end-to-end tests does on a plain directory what the tests rely on."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import hermes, venvs
from support.fake_model import Answer, Call, FakeModel, read_script, write_script

if TYPE_CHECKING:
    from support.fake_model import Json, Script

TESTS = Path(__file__).resolve().parents[1]
real_program = [pytest.mark.hermes, pytest.mark.slow]
TIMEOUT_S = 20


def ask(port: int, text: str, **settings: object) -> str:
    """Send one user message as Hermes does; return the raw answer."""
    body: Json = {"messages": [{"role": "user", "content": text}], "tools": [TOOL], **settings}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=TIMEOUT_S) as reply:
        return str(reply.read().decode())


TOOL = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}


def test_a_script_survives_its_way_through_json() -> None:
    assert {k: tuple(v) for k, v in read_script(write_script(hermes.SCRIPT)).items()} == dict(
        hermes.SCRIPT
    )


def test_a_streamed_answer_has_the_same_text_as_a_whole_one() -> None:
    said = "One word, then a word, then one word"
    with FakeModel({"go": [Answer(said)]}) as model:
        whole = json.loads(ask(model.port, "go"))
        events = ask(model.port, "go", stream=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == said
    assert whole["choices"][0]["message"]["content"] == said


def test_the_model_runs_as_a_program_and_reports_each_request(tmp_path: Path) -> None:
    script: Script = {"go": [Answer(calls=(Call("echo", {"text": "hi"}),))]}
    (tmp_path / "script.json").write_text(write_script(script))
    command = (sys.executable, "-m", "support.fake_model", str(tmp_path / "script.json"))
    with subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin
        assert program.stdout
        port = json.loads(program.stdout.readline())["port"]
        answer = json.loads(ask(port, "go"))
        reported = json.loads(program.stdout.readline())
        program.stdin.close()
        assert program.wait(TIMEOUT_S) == 0
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "echo"
    assert reported["body"]["messages"] == [{"role": "user", "content": "go"}]


def test_a_venv_that_was_left_half_made_is_made_anew_and_then_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    venv = venvs.Venv("small", ("pip",))
    left = tmp_path / "hpkfs" / "small" / "bin" / "left"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    assert not venvs.is_made(venv)
    python = venvs.python_of(venv)
    assert venvs.is_made(venv)
    assert not left.exists()
    left.write_text("kept")
    assert venvs.python_of(venv) == python
    assert left.exists()
    assert subprocess.run((python, "-c", ""), timeout=TIMEOUT_S, check=False).returncode == 0


class TestHermes:
    pytestmark = real_program

    def test_the_model_remembers_learns_writes_and_runs_and_then_knows_of_it(
        self, tmp_path: Path, workspace: Path, model: FakeModel
    ) -> None:
        home = hermes.make_home(tmp_path / "home", model.port)
        first = hermes.run_query(home, hermes.DO_ALL, cwd=workspace)
        assert (first.rc, first.stdout.splitlines()[-1]) == (0, "All is done.")
        assert hermes.FACT in (home / "memories" / "USER.md").read_text()
        assert (home / "skills" / "greeting" / "SKILL.md").read_text() == hermes.SKILL
        assert (workspace / "notes" / "note.md").read_text() == hermes.NOTE
        assert (workspace / "counted.txt").read_text() == "1\n2\n3\n"
        tool_results = [text for role, text in model.turns[-1].messages if role == "tool"]
        assert len(tool_results) == 6
        assert "Say good morning" in tool_results[2], "the skill was viewed"
        assert hermes.NOTE.strip() in tool_results[4], "the note was read"

        second = hermes.run_query(home, hermes.ASK_AGAIN, cwd=workspace, resume=first.session_id)
        assert second.session_id == first.session_id
        assert ("user", hermes.DO_ALL) in model.turns[-1].messages
        assert "You told me that your name is Ada." in second.stdout
        (session,) = hermes.sessions(home)
        assert session.messages[-1] == ("assistant", "You told me that your name is Ada.")
        assert session.cwd == str(workspace)

    def test_a_one_shot_run_is_a_conversation_of_its_own(
        self, tmp_path: Path, workspace: Path, model: FakeModel
    ) -> None:
        home = hermes.make_home(tmp_path / "home", model.port)
        run = hermes.run_query(home, hermes.REMEMBER, cwd=workspace, oneshot=True)
        assert (run.rc, run.stdout) == (0, "I will remember that you are Ada.\n")
        assert run.session_id == hermes.sessions(home)[-1].id
        assert not (home / "state.db-wal").exists(), "a one-shot run closes its database"

    def test_a_run_killed_while_the_model_speaks_keeps_the_question(
        self, tmp_path: Path, workspace: Path, model: FakeModel
    ) -> None:
        home = hermes.make_home(tmp_path / "home", model.port)
        running = hermes.start_query(home, hermes.THINK, cwd=workspace)
        try:
            model.wait_until_held()
        finally:
            hermes.kill_group(running)
        assert running.returncode == -9
        (killed,) = hermes.sessions(home)
        assert killed.messages == (("user", hermes.THINK),)
        resumed = hermes.run_query(home, hermes.ASK_AGAIN, cwd=workspace, resume=killed.id)
        assert resumed.rc == 0
        asked = "\n".join(text for role, text in model.turns[-1].messages if role == "user")
        assert asked.index(hermes.THINK) < asked.index(hermes.ASK_AGAIN)

    def test_a_real_home_has_what_an_import_must_take_and_leave(
        self, real_home: hermes.RealHome
    ) -> None:
        home = real_home.home
        assert {session.id for session in hermes.sessions(home)} == set(real_home.sessions)
        assert (home / "state.db-wal").stat().st_size > (home / "state.db").stat().st_size
        assert json.loads((home / "cron" / "jobs.json").read_text())["jobs"]
        assert (home / "plugins" / "counter" / "turns").read_text() == "turn\n" * 3
        planted = (home / ".env").read_text() + (home / "auth.json").read_text()
        assert all(secret in planted for secret in real_home.secrets)
        assert (real_home.workspace / "notes" / "note.md").read_text() == hermes.NOTE
        assert (home / "hermes-agent" / "venv" / "lib64").is_symlink()
