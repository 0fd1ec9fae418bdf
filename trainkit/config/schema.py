"""The JSON Schema of configurations, by which editors complete and check them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainkit.config.tree import TRLConfig
from trainkit.plugins import get_method_class

COMMENT = "# yaml-language-server: $schema={}"
"""The first line of a YAML file by which editors find its schema; ``{}`` is the schema's file."""


def json_schema(methods: Iterable[str]) -> dict[str, Any]:
    """Return the JSON Schema of configurations of these algorithms.

    Raises:
        RegistryError, PluginError: an algorithm is not installed, or its plugin cannot be used.
    """
    schema = TRLConfig.model_json_schema()
    parts = schema["$defs"]
    choices = []
    for name in methods:
        schema_of_method = get_method_class(name).model_json_schema(ref_template="#/$defs/{model}")
        parts |= schema_of_method.pop("$defs", {})
        schema_of_method["properties"]["name"] |= {"const": name}
        schema_of_method["required"] = ["name"]
        parts[schema_of_method["title"]] = schema_of_method
        choices.append({"$ref": f"#/$defs/{schema_of_method['title']}"})
    names = {"enum": [parts[choice["$ref"].rpartition("/")[2]]["properties"]["name"]["const"] for choice in choices]}
    schema["properties"]["method"] = {"anyOf": [names, *choices], "description": "The algorithm and its settings."}
    parts["PluginConfig"]["additionalProperties"] = True  # which settings there are, each plugin says
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "trainkit configuration"}
