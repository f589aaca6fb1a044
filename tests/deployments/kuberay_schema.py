"""KubeRay's own schema of a RayService, as a Kubernetes API server holds manifests against it.

The file beside this one is the `v1` schema of ray.io_rayservices.yaml (ray-operator/config/crd/bases) of KubeRay 1.7.0,
Apache License 2.0, without its descriptions. To make it anew from another version's file:

    .venv/bin/python -m tests.deployments.kuberay_schema ray.io_rayservices.yaml
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

FILE = Path(__file__).with_name("rayservice_v1.json.gz")


def validator() -> Draft202012Validator:
    """Validator of a RayService; refuses unknown fields, which an API server would drop."""
    return Draft202012Validator(closed(json.loads(gzip.decompress(FILE.read_bytes()))))


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    """Errors of a manifest, each after the path of its field."""
    for error in validator().iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def closed(schema: Any) -> Any:
    """The schema with unknown fields forbidden, except where Kubernetes preserves them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def without_descriptions(schema: Any) -> Any:
    """The schema without descriptions, a sixth as long."""
    if isinstance(schema, list):
        return [without_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if not (name == "description" and isinstance(part, str))}
    return {name: without_descriptions(part) for name, part in kept.items()}


def main() -> None:
    """Write the file."""
    document = yaml.load(Path(sys.argv[1]).read_text(encoding="utf-8"), yaml.CSafeLoader)
    versions = {version["name"]: version for version in document["spec"]["versions"]}
    schema = without_descriptions(versions["v1"]["schema"]["openAPIV3Schema"])
    text = json.dumps(schema, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
