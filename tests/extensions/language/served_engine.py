"""The small generation server in threads of this process, on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from embodied_language.engine_server import GenerationServer, listening
from embodied_language.engines import InProcessEngine

Kind = Callable[[InProcessEngine, str], GenerationServer]


@contextmanager
def served(folder: Path, port: int = 0, kind: Kind = GenerationServer) -> Iterator[str]:
    """The address of a server of the model; port 0: a free one."""
    server = listening("127.0.0.1", port, kind(InProcessEngine(folder), str(folder)))
    running = threading.Thread(target=server.serve_forever, args=(0.01,))
    running.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        running.join()
