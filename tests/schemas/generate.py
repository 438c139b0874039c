"""Cut the schemas of examples/launch/*.y*ml out of the packages that read these files.

In an environment of its own:

    pip install skypilot dstack kubeflow-trainer-api pyyaml
    python tests/schemas/generate.py

An object that an example uses keeps the names of all its properties, and refuses others; of what no example uses, the
inside is left out.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "launch"
QUANTITY = {"type": ["string", "number"]}  # pydantic's model of it is one of Python, not of YAML


def main() -> None:
    from dstack._internal.core.models.configurations import TaskConfiguration
    from kubeflow_trainer_api import models
    from sky.utils import schemas

    task: dict[str, Any] = schemas.get_task_schema()
    task["properties"]["resources"] = schemas.get_resources_schema()
    write("skypilot", "skypilot", task, documents("skypilot.yaml"))
    dstack = TaskConfiguration.model_json_schema()
    dstack["properties"]["env"] = {"type": ["array", "object"]}  # a model with a parser of its own
    write("dstack", "dstack", dstack, documents("dstack.yml"))
    job = models.TrainerV1alpha1TrainJob.model_json_schema(by_alias=True)
    write("trainjob", "kubeflow-trainer-api", job, documents("kubeflow_trainjob.yaml"))
    service, job = documents("kubernetes_job.yaml")
    kind = models.IoK8sApiCoreV1Service.model_json_schema(by_alias=True)
    write("service", "kubeflow-trainer-api", kind, [service])
    kind = models.IoK8sApiBatchV1Job.model_json_schema(by_alias=True)
    write("job", "kubeflow-trainer-api", kind, [job])


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def write(name: str, package: str, schema: dict[str, Any], values: list[Any]) -> None:
    comment = f"from {package} {version(package)}, by tests/schemas/generate.py"
    cut = {"$comment": comment, **prune(schema, schema, values)}
    (HERE / f"{name}.json").write_text(json.dumps(cut, indent=1) + "\n")


def prune(schema: Any, root: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """The part of a schema that speaks of these values, which stand in one place of an example."""
    if schema is True or not values:
        return {}
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return QUANTITY if name.endswith("Quantity") else prune(root["$defs"][name], root, values)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            fitting = [resolve(s, root) for s in schema[word] if any(fits(resolve(s, root), v) for v in values)]
            cut = [prune(s, root, [v for v in values if fits(s, v)]) for s in fitting]
            return cut[0] if len(cut) == 1 else {"anyOf": cut}
    kept = {
        key: schema[key]
        for key in ("type", "enum", "const", "required", "minimum", "maximum", "pattern")
        if key in schema
    }
    if any(isinstance(v, dict) for v in values) and ("properties" in schema or "additionalProperties" in schema):
        known = schema.get("properties", {})
        kept["properties"] = {key: prune(s, root, [v[key] for v in values if key in v]) for key, s in known.items()}
        other = schema.get("additionalProperties", True)
        if known and other is True:  # the servers refuse what they do not know
            other = False
        free = [x for v in values for key, x in v.items() if key not in known]
        kept["additionalProperties"] = prune(other, root, free) if isinstance(other, dict) else other
        if "patternProperties" in schema:
            kept["patternProperties"] = schema["patternProperties"]
    if "items" in schema:
        kept["items"] = prune(schema["items"], root, [x for v in values for x in v])
    return kept


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema or schema["$ref"].endswith("Quantity"):
        return schema
    return root["$defs"][schema["$ref"].removeprefix("#/$defs/")]


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is of an alternative's type."""
    if "$ref" in schema:
        return isinstance(value, (str, int, float))
    types = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    wanted = schema.get("type", types[type(value)])
    return types[type(value)] in wanted if isinstance(wanted, list) else types[type(value)] == wanted


if __name__ == "__main__":
    main()
