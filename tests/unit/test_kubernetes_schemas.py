"""Every rendered manifest is what Kubernetes takes: checked against its schemas, without unknown fields.

Those of KEDA and the Prometheus Operator are checked against schemas of the fields that we use.
"""

from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.children import ROOT
from tests.support.kubernetes import VARIANTS, Rendered, Resource

VERSIONS = ("1.36", "1.37")
CUSTOM: dict[str, Any] = yaml.safe_load(
    (ROOT / "tests/support/custom_resources.yaml").read_text(encoding="utf-8")
)


@cache
def custom(kind: str) -> Any:
    """The validator of a custom resource."""
    return jsonschema.Draft202012Validator({"$ref": f"#/definitions/{kind.replace('/', '~1')}", **CUSTOM})


def check(resource: Resource, version: str) -> None:
    """ValidationError if the resource is not as its schema says."""
    kind = f"{resource['apiVersion']} {resource['kind']}"
    if kind in CUSTOM["definitions"]:
        custom(kind).validate(resource)
    else:
        assert kubernetes_validate.validate(resource, version, strict=True) == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_resource_is_as_its_schema_says(variant: str, version: str) -> None:
    for resource in Rendered(variant).all:
        check(resource, version)
