# SPDX-License-Identifier: Apache-2.0
"""The page on the server's HTTP API, made of `server/openapi.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from website.markdown import table

__all__ = ["operations_of", "server_page"]

METHODS: Final = ("get", "post", "put", "patch", "delete")

Node = dict[str, Any]


def _resolved(contract: Node, node: Node) -> Node:
    """What a `$ref` names, else the node itself."""
    while "$ref" in node:
        found: Any = contract
        for part in str(node["$ref"]).lstrip("#/").split("/"):
            found = found[part]
        node = found
    return node


def operations_of(contract: Node) -> Iterator[tuple[str, str, Node, list[Node]]]:
    """Method, path, operation and all its parameters, in the order of the contract."""
    for path, item in contract["paths"].items():
        for method in METHODS:
            if method in item:
                operation = item[method]
                listed = [*item.get("parameters", ()), *operation.get("parameters", ())]
                yield method.upper(), path, operation, [_resolved(contract, one) for one in listed]


def shape(schema: Node) -> str:
    """A schema in a few words; named ones by their name."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    for word, joint in (("oneOf", " | "), ("anyOf", " | "), ("allOf", " & ")):
        if word in schema:
            return joint.join(shape(one) for one in schema[word])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{shape(schema.get('items', {}))}]"
    if kind == "object" and "properties" in schema:
        needed = schema.get("required", ())
        inner = (
            f"{name}{'' if name in needed else '?'}: {shape(one)}"
            for name, one in schema["properties"].items()
        )
        return "{" + ", ".join(inner) + "}"
    return " | ".join(kind) if isinstance(kind, list) else str(kind)


def _limits(schema: Node) -> str:
    words = [
        f"{name} {schema[name]}"
        for name in ("minimum", "maximum", "minLength", "maxLength")
        if name in schema
    ]
    words += [f"default {schema['default']}"] if "default" in schema else []
    words += [f"matches `{schema['pattern']}`"] if "pattern" in schema else []
    return ", ".join(words)


def _content(node: Node) -> str:
    texts = []
    for kind, content in node.get("content", {}).items():
        of = f" `{shape(content['schema'])}`" if "schema" in content else ""
        texts.append(f"{of.strip()}" if kind == "application/json" and of else f"{kind}{of}")
    return " or ".join(texts)


def _parameter(one: Node) -> tuple[str, ...]:
    schema = one.get("schema", {})
    said = "; ".join(filter(None, (one.get("description", ""), _limits(schema))))
    needed = ", required" if one.get("required") else ""
    return f"`{one['name']}`", f"{one['in']}{needed}", f"`{shape(schema)}`", said


def _operation(contract: Node, method: str, path: str, operation: Node, parameters: list[Node]) -> str:
    parts = [f"### {method} {path}\n", f"{operation.get('summary', '')}\n"]
    if "description" in operation:
        parts.append(f"{operation['description'].strip()}\n")
    if operation.get("security") == []:
        parts.append("Nobody has to be logged in.\n")
    if parameters:
        parts.append(table(("parameter", "in", "type", ""), [_parameter(one) for one in parameters]))
    if "requestBody" in operation:
        body = _resolved(contract, operation["requestBody"])
        parts.append(f"Body: {_content(body)}\n")
    rows = []
    for status, node in operation["responses"].items():
        answer = _resolved(contract, node)
        rows.append((f"{status}", answer.get("description", ""), _content(answer)))
    parts.append(table(("status", "meaning", "content"), rows))
    return "\n".join(parts)


def _schema(name: str, schema: Node) -> str:
    parts = [f"### {name}\n"]
    if "description" in schema:
        parts.append(f"{schema['description']}\n")
    if "properties" in schema:
        needed = schema.get("required", ())
        rows = [
            (
                f"`{field}`" + ("" if field in needed else " (optional)"),
                f"`{shape(one)}`",
                "; ".join(filter(None, (one.get("description", ""), _limits(one)))),
            )
            for field, one in schema["properties"].items()
        ]
        parts.append(table(("field", "type", ""), rows))
    else:
        parts.append("; ".join(filter(None, (f"`{shape(schema)}`", _limits(schema)))) + "\n")
    return "\n".join(parts)


def server_page(root: Path) -> str:
    """Every operation and every schema."""
    contract = yaml.safe_load((root / "server/openapi.yaml").read_text(encoding="utf-8"))
    parts = [
        "# Server API\n",
        "<!-- Made of server/openapi.yaml by tools/build_site.py. -->\n",
        f"Version {contract['info']['version']}. The contract is [openapi.yaml](../../server/openapi.yaml); "
        "[the guide](../guide/server.md) says how to run the server.\n",
        contract["info"]["description"],
    ]
    operations = list(operations_of(contract))
    for tag in contract["tags"]:
        parts.append(f"## {tag['name'].capitalize()}\n")
        if "description" in tag:
            parts.append(f"{tag['description']}\n")
        parts += [_operation(contract, *one) for one in operations if one[2]["tags"][0] == tag["name"]]
    parts.append("## Schemas\n")
    parts += [_schema(name, schema) for name, schema in contract["components"]["schemas"].items()]
    return "\n".join(parts)
