"""How long until a mount is ready: a large agent, a small one, and the imports alone."""

from __future__ import annotations

import sys

from bench.lib import Table, call, cleaned, clock, rounds, work_folder
from support.big_store import big_store, copy_store, small_store
from support.mounts import Mount

ROUNDS = 5


def main() -> None:
    table = Table("Mount ready (`hpkfs mount` from start to return)")
    with work_folder() as root:
        big = Mount(copy_store(big_store(), root / "big"), root, name="big")
        small = Mount(copy_store(small_store(), root / "small"), root, name="small")
        with cleaned(big), cleaned(small):
            made = 0

            def ready(mount: Mount, *, fresh: bool) -> float:
                nonlocal made
                if fresh:
                    made += 1
                    mount.state = root / f"state-{made}"
                spent = clock(mount.mount)
                mount.umount("--no-publish")
                return spent

            times = rounds(
                ROUNDS,
                {
                    "imports": lambda: clock(
                        lambda: call(sys.executable, "-c", "import trio, pyfuse3")
                    ),
                    "big first": lambda: ready(big, fresh=True),
                    "big again": lambda: ready(big, fresh=False),
                    "small first": lambda: ready(small, fresh=True),
                    "small again": lambda: ready(small, fresh=False),
                },
            )
    for kind in ("again", "first"):
        ours = times[f"big {kind}"]
        table.more(
            f"1,800 files and 211 MB, mounted {kind}, beyond `import trio, pyfuse3`",
            must=0.5,
            ours=ours,
            other=times["imports"],
        )
        table.ratio(
            f"1,800 files and 211 MB, mounted {kind}, against 10 files and 1 MB",
            must=1.3,
            ours=ours,
            other=times[f"small {kind}"],
        )
    table.show()


if __name__ == "__main__":
    main()
