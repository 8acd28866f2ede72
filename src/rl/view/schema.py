"""What the server answers, described: as an OpenAPI document, and as types for the page's scripts."""

from typing import Any

import msgspec

from rl.view.routes import ROUTES

REF = "#/components/schemas/{name}"
SCALARS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}
HEAD = """// Types of what the server answers, made from src/rl/view/answers.py by `uv run scripts/reference.py`.

"""


def components() -> dict[str, Any]:
    """The JSON schema of every type that is answered, by name."""
    return msgspec.json.schema_components([route.gives for route in ROUTES], ref_template=REF)[1]


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document of all routes."""
    paths = {}
    for route in ROUTES:
        (reference,), _ = msgspec.json.schema_components([route.gives], ref_template=REF)
        schema = msgspec.json.schema(route.takes)
        takes = schema["$defs"][route.takes.__name__]
        parameters = [
            {"name": name, "in": "query", "required": name in takes.get("required", ()), "schema": kind}
            for name, kind in takes["properties"].items()
        ]
        answer = {"description": route.what, "content": {"application/json": {"schema": reference}}}
        paths[f"/api/{route.name}"] = {"get": {"summary": route.what, "parameters": parameters, "responses": {"200": answer}}}
    return {"openapi": "3.1.0", "info": {"title": "rl view", "version": "1"}, "paths": paths, "components": {"schemas": components()}}


def script_types() -> str:
    """The content of page/types.d.ts: an interface for each type, and `Answers` from the name of a route to its type."""
    lines = [HEAD.rstrip("\n"), ""]
    for name, schema in components().items():
        lines.append(f"export interface {name} {{")
        lines += [f"  {key}: {script_type(kind)};" for key, kind in schema["properties"].items()]
        lines += ["}", ""]
    lines.append("export interface Answers {")
    lines += [f"  {route.name}: {route.gives.__name__};" for route in ROUTES]
    return "\n".join([*lines, "}", ""])


def script_type(schema: dict[str, Any]) -> str:
    """A JSON schema as a type of TypeScript."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(script_type(kind) for kind in schema["anyOf"]))
    if schema.get("type") == "array":
        inner = script_type(schema.get("items", {}))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"Record<string, {script_type(inner) if isinstance(inner, dict) and inner else 'any'}>"
    return SCALARS.get(str(schema.get("type")), "any")
