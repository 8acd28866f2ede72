"""Run in a sandbox: asks the kernel for each call in the JSON file, and prints how it answered: 0, or the number of the error."""

import ctypes
import json
import sys
from pathlib import Path


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    found = {}
    for what, (number, arguments) in json.loads(Path(sys.argv[1]).read_text()).items():
        values = [value.encode("latin-1") if isinstance(value, str) else value for value in arguments]
        pointers = [ctypes.create_string_buffer(value) if isinstance(value, bytes) else ctypes.c_long(value) for value in values]
        ctypes.set_errno(0)
        found[what] = ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *pointers) == -1 else 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
