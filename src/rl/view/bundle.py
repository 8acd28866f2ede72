"""Bundles the page into one file: its styles, and its modules as one classic script, which a
page opened from a file may run."""

import base64
import hashlib
import re
from pathlib import Path

IMPORT = re.compile(r'^import\s*(?:\{([^}]*)\}|(\w+))\s*from\s*"([^"]+)";?', re.M)
EXPORT_LIST = re.compile(r"\bexport\s*\{([^}]*)\};?")
EXPORT_DEFAULT = re.compile(r"\bexport default\s*")
EXPORT = re.compile(r"^export (?=(?:async function|function|const|class) (\w+))", re.M)


def bundle(page: Path) -> str:
    """One script equivalent to the module main.js with all its imports. Imports must be relative
    and acyclic."""
    order: list[Path] = []
    visit((page / "main.js").resolve(), order, ())
    names = {path: f"m{i}" for i, path in enumerate(order)}
    return "\n".join(wrapped(path, names) for path in order)


def visit(path: Path, order: list[Path], above: tuple[Path, ...]) -> None:
    """Appends a module to `order` after everything that it imports."""
    assert path not in above, f"{path} imports itself through {above}"
    if path in order:
        return
    for match in IMPORT.finditer(path.read_text()):
        visit((path.parent / match[3]).resolve(), order, (*above, path))
    order.append(path)


def wrapped(path: Path, names: dict[Path, str]) -> str:
    """A module as a function that is called immediately and returns its exports."""
    exported: list[str] = []

    def imported(match: re.Match[str]) -> str:
        source = names[(path.parent / match[3]).resolve()]
        if match[2]:
            return f"const {match[2]} = {source}.default;"
        return (
            "const "
            f"{{{', '.join(renamed(item, ': ') for item in match[1].split(',') if item.strip())}}} "
            f"= {source};"
        )

    def listed(match: re.Match[str]) -> str:
        for item in filter(str.strip, match[1].split(",")):
            local, _, name = item.partition(" as ")
            exported.append(f"{name.strip() or local.strip()}: {local.strip()}")
        return ""

    def named(match: re.Match[str]) -> str:
        exported.append(match[1])
        return ""

    text = IMPORT.sub(imported, path.read_text())
    text = EXPORT_LIST.sub(listed, text)
    text = EXPORT.sub(named, text)
    text, count = EXPORT_DEFAULT.subn("const default_ = ", text)
    exported += ["default: default_"] if count else []
    return (
        f'const {names[path]} = (() => {{"use strict";\n{text}\nreturn '
        f"{{{', '.join(exported)}}};\n}})();"
    )


def renamed(item: str, between: str) -> str:
    """Converts `a as b` to `a: b`."""
    before, _, after = item.partition(" as ")
    return f"{before.strip()}{between}{after.strip()}" if after else before.strip()


def digest(text: str) -> str:
    """The source expression that allows an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def within_element(data: str) -> str:
    """Escapes JSON so that it cannot end the element around it: `<` occurs only in strings,
    where it can be escaped."""
    return data.replace("<", "\\u003c")


def document(page: Path, data: str, title: str) -> str:
    """A self-contained page. data: JSON, which becomes `window.recorded`; it cannot end the
    element around it."""
    style = "\n".join(
        (page / name).read_text() for name in ("vendor/uPlot.min.css", "style.css", "parts.css")
    )
    start = 'window.recorded = JSON.parse(document.getElementById("recorded").textContent);'
    script = "\n".join(
        [(page / "vendor/uPlot.iife.min.js").read_text(), start, bundle(page)]
    ).replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta '
        'name="referrer" content="no-referrer">\n'
        f'<title>{title}</title>\n<style>{style}</style></head>\n<body><div id="app"></div>\n'
        '<script type="application/json" '
        f'id="recorded">{within_element(data)}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )
