"""What every test starts from."""

from __future__ import annotations

import signal

# A shell starts what it puts into the background with SIGINT ignored, and Python then leaves it so. Tests send
# it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
