"""The command takes the lowest priority, which a process cannot give back: not that of the
tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def priority(monkeypatch) -> list[int]:
    """What the command asked for."""
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    return asked
