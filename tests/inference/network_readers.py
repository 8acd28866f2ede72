"""The process of a reader, see network_ranks.py."""

from tests.inference.network_ranks import read_forever as main

__all__ = ["main"]
