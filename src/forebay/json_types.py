"""The type of JSON objects, which manifests, messages and reports are made of."""

from typing import Any

Json = dict[str, Any]
