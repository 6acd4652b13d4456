"""The results' file: of each part what was measured, of which sources, on what, when and by which command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""Of a part: `state` (measured, failed, late), `figures`, and what they belong to."""
MEASURED = "measured"


class Record:
    """Entries by the part's name. The file is written as a whole at every change."""

    def __init__(self, path: Path) -> None:
        """Raises `SystemExit` for a file that is there and is no such record: it must not be lost."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        if path.exists():
            try:
                self.entries = json.loads(path.read_text())["parts"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"{path} is no record of this command ({error}): name another with --json") from error

    def is_measured(self, name: str, identity: dict[str, str]) -> bool:
        """Whether that part was measured of the same sources on the same hardware."""
        entry = self.entries.get(name, {})
        return entry.get("state") == MEASURED and entry.get("identity") == identity

    def was_tried(self, name: str, identity: dict[str, str]) -> bool:
        """Whether that part was begun, and not measured, of the same sources on the same hardware."""
        entry = self.entries.get(name, {})
        last = entry.get("failed_since", entry)
        return last.get("state") != MEASURED and last.get("identity") == identity

    def put(self, name: str, entry: Entry) -> None:
        """Note a part. What was measured before stays where the new try measured less: the failure stands beside it."""
        before = self.entries.get(name, {})
        if before.get("state") == MEASURED and entry["state"] != MEASURED:
            entry = {**before, "failed_since": entry}
        self.entries[name] = entry
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")
        aside.write_text(json.dumps({"format": 1, "parts": self.entries}, indent=1) + "\n")
        os.replace(aside, self.path)
