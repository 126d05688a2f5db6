"""Two small domains, which tests of clients that are domains share."""

import pytest
from helpers import lay_shop


@pytest.fixture
def shops(tmp_path, monkeypatch):
    """20 users and 15 items of books, 12 and 11 of games, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    lay_shop("books", 1, 20, 15)
    lay_shop("games", 2, 12, 11)
