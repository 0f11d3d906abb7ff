"""References within a JSON schema, and what each of them names.

Owns URIs, anchors and pointers. Knows no keyword but these. Fetches nothing.

    {"$ref": "#/$defs/a", "$defs": {"a": A}}   ──►   ({"$ref": ...}, A)
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin

from forge.schema_keywords import iterate_subschemas


def find_references(root: object) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], Any]]]:
    """Return the schemas in the root, and those that have a reference, each with what it names.

    A reference may name a literal, which then is a schema. One to another document names nothing
    here, and llguidance refuses it.
    """
    resources: dict[str, Any] = {"": root}
    schemas: dict[int, dict[str, Any]] = {}
    references: list[tuple[dict[str, Any], str]] = []

    def visit(start: object, base: str) -> None:
        stack = [(start, base)]
        while stack:
            schema, base = stack.pop()
            if not isinstance(schema, dict) or id(schema) in schemas:
                continue
            schemas[id(schema)] = schema
            if isinstance(schema.get("$id"), str):
                base = urljoin(base, schema["$id"]).removesuffix("#")
                resources[base] = schema
            if isinstance(schema.get("$anchor"), str):
                resources[f"{base}#{schema['$anchor']}"] = schema
            if isinstance(schema.get("$ref"), str):
                references.append((schema, base))
            stack += ((each, base) for each in iterate_subschemas(schema))

    visit(root, "")
    targets = []
    for schema, base in references:  # which grows
        reference = schema["$ref"]
        uri = base + reference if reference.startswith("#") else urljoin(base, reference)
        document, _, fragment = uri.partition("#")
        if fragment.startswith("/"):
            target = find_pointer(resources.get(document), fragment)
        else:
            target = resources.get(uri.removesuffix("#"))
        if target is not None:
            visit(target, document)
            targets.append((schema, target))
    return list(schemas.values()), targets


def find_pointer(value: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer names, or None."""
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
