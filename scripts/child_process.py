"""What the processes that scripts start have in common."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ended.

    Otherwise a rank that waits for others, or a worker that waits for work, lives on when its
    script is killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "not started by multiprocessing"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
