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
    modules: dict[Path, str] = {}
    add(page / "main.js", modules, ())
    return "\n".join(modules.values())


def add(path: Path, modules: dict[Path, str], above: tuple[Path, ...]) -> None:
    """Adds a module after everything that it imports, as a function that is called immediately
    and returns its exports."""
    assert path not in above, f"{path} imports itself through {above}"
    if path in modules:
        return
    text = path.read_text()
    for match in IMPORT.finditer(text):
        add((path.parent / match[3]).resolve(), modules, (*above, path))
    order = [*modules]

    def imported(match: re.Match[str]) -> str:
        names = f"default: {match[2]}" if match[2] else match[1].replace(" as ", ": ")
        return f"const {{{names}}} = m{order.index((path.parent / match[3]).resolve())};"

    exports = EXPORT.findall(text)
    for item in filter(str.strip, ",".join(EXPORT_LIST.findall(text)).split(",")):
        local, _, name = map(str.strip, item.partition(" as "))
        exports.append(f"{name or local}: {local}")
    if EXPORT_DEFAULT.search(text):
        exports.append("default: default_")
    text = EXPORT.sub("", EXPORT_LIST.sub("", IMPORT.sub(imported, text)))
    text = EXPORT_DEFAULT.sub("const default_ = ", text)
    modules[path] = (
        f'const m{len(order)} = (() => {{"use strict";\n{text}\n'
        f"return {{{', '.join(exports)}}};\n}})();"
    )


def digest(text: str) -> str:
    """The source expression that allows an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def document(page: Path, data: str, title: str) -> str:
    """A self-contained page. data: JSON, which becomes `window.recorded`; it cannot end the
    element around it."""
    styles = ("vendor/uPlot.min.css", "style.css", "parts.css")
    style = "\n".join((page / name).read_text() for name in styles)
    start = 'window.recorded = JSON.parse(document.getElementById("recorded").textContent);'
    plots = (page / "vendor/uPlot.iife.min.js").read_text()
    script = f"{plots}\n{start}\n{bundle(page.resolve())}".replace("</script", "<\\/script")
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )
    # `<` occurs only in strings of the JSON, where it can be escaped
    content = data.replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style></head>
<body><div id="app"></div>
<script type="application/json" id="recorded">{content}</script>
<script>{script}</script>
</body></html>
"""
