"""Hashes of records and of readable rollouts, from the standard library; for files and tensors
see `digests`."""

import hashlib


def blake2b(data: bytes | bytearray | memoryview) -> bytes:
    """Returns BLAKE2b-128, used for records, which are read and written one by one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Returns SHA-256 in hexadecimal, used for readable text, so that `sha256sum --check` can
    verify it."""
    return hashlib.sha256(data).hexdigest()
