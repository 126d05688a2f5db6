"""Tests of data run in an empty folder, where ``data`` is looked for."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
