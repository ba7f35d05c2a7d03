# SPDX-License-Identifier: Apache-2.0
"""Reading and writing plain mappings as JSON and YAML for the configuration.

Reading is stricter than the parsers are by default: a key given twice is an error, since one of the two
values would otherwise vanish without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from memscale.errors import ConfigError, MemScaleError


def dump_json(data: Mapping[str, object], indent: int | None = 2) -> str:
    """Writes a mapping of plain values as JSON."""
    return json.dumps(data, indent=indent, allow_nan=False)


def load_json(text: str | bytes) -> object:
    """Reads JSON. A `ConfigError` says where the text is broken or which key is given twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ConfigError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"the configuration is not valid JSON: {error}") from error


def dump_yaml(data: Mapping[str, object]) -> str:
    """Writes a mapping of plain values as YAML, in the order of its keys."""
    text: str = _yaml().safe_dump(dict(data), sort_keys=False)
    return text


def load_yaml(text: str | bytes) -> object:
    """Reads one YAML document of plain values. A `ConfigError` says where the text is broken."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]  # the base is known only here
        """PyYAML's safe loader; a mapping with a key given twice is refused."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _without_duplicates([(key.value, value) for key, value in node.value])
            result: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return result

    try:
        document: object = yaml.load(text, Loader=Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the configuration is not valid YAML: {error}") from error
    return document


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of the pairs; a key that comes twice is a `ConfigError`."""
    seen: dict[Any, Any] = {}
    for key, value in pairs:
        if isinstance(key, str) and key in seen:
            raise ConfigError(f"the configuration gives {key!r} twice: keep one of the two", key)
        if isinstance(key, str):
            seen[key] = value
    return seen


def _yaml() -> ModuleType:
    """PyYAML, which is optional and slow to import, hence here."""
    try:
        import yaml
    except ImportError as error:
        message = "YAML needs the package PyYAML: 'pip install pyyaml', or use to_json and from_json"
        raise MemScaleError(message) from error
    return yaml
