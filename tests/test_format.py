"""The documented schemas are those of the records, and the files on disk fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from aiockpt import Saver
from aiockpt._manifest import Manifest, NodePage, Part, TensorPage, ValuePage

DOCS = Path(__file__).parent.parent / "docs"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def manifest_schema() -> dict[str, Any]:
    """The schema of `manifest.json`: the record, and the checksum that follows it."""
    schema = msgspec.json.schema(Manifest)
    record = schema["$defs"]["Manifest"]
    record["properties"]["checksum"] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    record["required"].append("checksum")
    return {"$schema": DIALECT, "title": "aiockpt root manifest, format 0", **schema}


def part_schema() -> dict[str, Any]:
    """The schema of `part-*.json`, its pages spelled out."""
    schema = msgspec.json.schema(Part)
    pages = {"tensors": TensorPage, "values": ValuePage, "nodes": NodePage}
    for column, page in pages.items():
        schema["$defs"].update(msgspec.json.schema(page)["$defs"])
        schema["$defs"]["Part"]["properties"][column]["items"] = {"$ref": f"#/$defs/{page.__name__}"}
    return {"$schema": DIALECT, "title": "aiockpt part, format 0", **schema}


SCHEMAS = {"manifest.schema.json": manifest_schema, "part.schema.json": part_schema}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_in_the_docs_is_that_of_the_records(name: str) -> None:
    """`python -m tests.test_format` writes the schemas anew."""
    assert json.loads((DOCS / name).read_text()) == SCHEMAS[name]()


async def test_files_on_disk_fit_their_schemas(tmp_path: Path) -> None:
    """A checkpoint with tensors, values, containers and files is what the page says."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"model": model, "l": [torch.ones(2), {"x": float("nan")}], "plain": {"a": (1, "b")}}
    async with Saver(tmp_path) as saver:
        await saver.save(state, step=7, metrics={"loss": float("inf")}, files={"config.json": "{}"})
    folder = tmp_path / "step-00000007"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    part = json.loads((folder / "part-00000.json").read_bytes())
    jsonschema.validate(manifest, json.loads((DOCS / "manifest.schema.json").read_text()))
    jsonschema.validate(part, json.loads((DOCS / "part.schema.json").read_text()))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["manifest.json", *(file["name"] for file in manifest["files"])]
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {**manifest, "step": "7"}, json.loads((DOCS / "manifest.schema.json").read_text())
        )


if __name__ == "__main__":
    for name, make in SCHEMAS.items():
        (DOCS / name).write_text(json.dumps(make(), indent=2) + "\n")
