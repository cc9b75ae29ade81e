"""What ties vLLM's processes to the server that started them."""

import os
import select
import threading

SERVER = "HEADWAY_SERVER_PID"
"""Names the process that the workers belong to."""


def end_with_server() -> None:
    """End this process as soon as its server has, however that ended: one that was killed could not have told us."""
    try:
        handle = os.pidfd_open(int(os.environ[SERVER]))
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="headway-tether", daemon=True).start()
