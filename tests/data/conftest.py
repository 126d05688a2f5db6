"""Tests of data run in an empty folder, where ``data`` is looked for."""

import pytest


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
