"""YAML whose numbers are what they look like: ``010`` and ``1:30`` are texts here, which YAML 1.1 reads as 8 and 90.

A key that is there twice is an error.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import yaml

_BASE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_PLAIN = {_INT: r"[-+]?(?:0|[1-9][0-9]*)",
          _FLOAT: r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
                  r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"}


class _Loader(_BASE):
    """The safe loader with plain numbers and single keys."""

    yaml_implicit_resolvers = {first: [(tag, re.compile(f"(?:{_PLAIN[tag]})$") if tag in _PLAIN else pattern)
                                       for tag, pattern in resolvers]
                               for first, resolvers in _BASE.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there {keys.count(key.value)} "
                                                        f"times, leave one of them", key.start_mark)
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=64)
def parsed(text: str) -> Any:
    """The content of a file, kept: tables ask for a few files hundreds of times. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)
