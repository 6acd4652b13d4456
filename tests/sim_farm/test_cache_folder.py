"""The cache folder, and what takes its place where it cannot be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sim_farm.cache_folder import cache


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # Root may write everywhere: the answer that others get.
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in Path(path).parts)
    return tmp_path / "temporary"


def test_it_is_where_the_user_says_and_need_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache() == tmp_path / "new" / "embodied"


def test_a_temporary_folder_of_this_user_takes_its_place(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "locked" / "cache"))
    found = cache()
    assert found.parent == temporary and found.stat().st_mode & 0o777 == 0o700 and cache() == found


def test_a_folder_that_others_may_enter_is_refused(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "locked"))
    cache().chmod(0o755)
    with pytest.raises(PermissionError, match="is not this user's alone: delete it, or set XDG_CACHE_HOME"):
        cache()
