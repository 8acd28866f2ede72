"""The hashes of records and of readable rollouts, for which every process has what it needs; those of files and tensors: `digests`."""

import hashlib


def blake2b(data: bytes | memoryview) -> bytes:
    """BLAKE2b-128: of records, which are read and written one by one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal: of readable text, whose sum `sha256sum --check` reads."""
    return hashlib.sha256(data).hexdigest()
