"""The real Hermes on the mount and in a plain folder with the same content."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

from bench.lib import NEVER_SEAL, Table, cleaned, rounds, wait_hydrated, work_folder
from support import hermes
from support.big_store import big_store, copy_store
from support.fake_model import FakeModel, Request
from support.mounts import Mount

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 7


def main() -> None:
    table = Table("`hermes --oneshot`, start to first chat request, warm")
    asked: list[float] = []

    def note(request: Request) -> None:
        if request.is_turn:
            asked.append(time.perf_counter())

    with work_folder() as root, FakeModel(hermes.SCRIPT, on_request=note) as model:
        mount = Mount(copy_store(big_store(), root / "store"), root)
        with cleaned(mount):
            mount.mount(NEVER_SEAL)
            wait_hydrated(mount)
            hermes.make_home(mount.path, model.port)
            plain = root / "plain"
            shutil.copytree(mount.path, plain, symlinks=True)

            def start(home: Path) -> float:
                asked.clear()
                started = time.perf_counter()
                run = hermes.run_query(home, hermes.ASK_AGAIN, cwd=home / "workspace", oneshot=True)
                assert run.rc == 0, run
                return asked[0] - started

            for home in (mount.path, plain):
                start(home)
            times = rounds(
                ROUNDS, {"ours": partial(start, mount.path), "plain": partial(start, plain)}
            )
    table.ratio(
        "on the mount against a plain folder", must=1.1, ours=times["ours"], other=times["plain"]
    )
    table.show()


if __name__ == "__main__":
    main()
