"""Types of arguments by JSON schemas, as pydantic, MCP servers and hand-written files have them."""

import enum
import time
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from phalanx.environments.tools import BadCall, schema_of, schema_tool
from phalanx.models.lm.calls import parser
from phalanx.models.lm.schemas import parameter_types


class Point(BaseModel):
    x: int
    y: float | None = None


class Near(BaseModel):
    kind: Literal["near"] = "near"
    points: list[Point] = []


class Far(BaseModel):
    kind: Literal["far"] = "far"


class Color(enum.Enum):
    RED = "red"
    ONE = "1"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Node(BaseModel):
    value: int
    following: Optional["Node"] = None


class Arguments(BaseModel):
    point: Point
    maybe: Point | None = None
    place: Annotated[Near | Far, Field(discriminator="kind")]
    color: Color
    level: Level
    some: Literal[1, 2]
    mixed: Literal[1, "a"]
    points: list[Point]
    sizes: dict[str, int]
    text: str
    label: str | None = None
    either: str | int
    node: Node
    anything: Any
    on: bool


# by argument: what the model writes, and what the tool gets
WRITTEN: dict[str, list[tuple[str, Any]]] = {
    "point": [('{"x": 1}', {"x": 1}), ("one", "one")],
    "maybe": [('{"x": 1}', {"x": 1}), ("null", None), ("None", None)],
    "place": [('{"kind": "near", "points": [{"x": 2}]}', {"kind": "near", "points": [{"x": 2}]})],
    "color": [("red", "red"), ("1", "1"), ("7", "7")],
    "level": [("2", 2)],
    "some": [("1", 1)],
    "mixed": [("1", 1), ("a", "a")],
    "points": [('[{"x": 1}, {"x": 2}]', [{"x": 1}, {"x": 2}])],
    "sizes": [('{"a": 1}', {"a": 1})],
    "text": [("7", "7"), ('{"x": 1}', '{"x": 1}'), ("null", "null")],
    "label": [("7", "7"), ("null", None)],
    "either": [("7", "7")],
    "node": [('{"value": 1, "following": {"value": 2}}', {"value": 1, "following": {"value": 2}})],
    "anything": [("7", "7")],
    "on": [("True", True), ("false", False)],
}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
REFERRED = {
    "definitions": {
        "a/b": POINT,
        "again": {"$ref": "#/definitions/again"},
        "all": {"allOf": [{"$ref": "#/definitions/a~1b"}]},
    },
    "properties": {
        "deep": {"$ref": "#/definitions/all"},
        "again": {"$ref": "#/definitions/again"},
        "nowhere": {"$ref": "#/definitions/nowhere"},
        "narrowed": {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]},
        "one": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        "listed": {"items": {"type": "integer"}},
        "const": {"const": 3},
        "named": {"type": "str"},
        "nullable": {"type": "integer", "nullable": True},
        "true": True,
        "contradictory": {"type": "integer", "enum": ["1", "2"]},
    },
    "additionalProperties": {"type": "integer"},
}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "put", "parameters": parameters}}


def read(form: str, parameters: Any, name: str, value: str) -> Any:
    texts = {
        "qwen3_coder": f"<tool_call>\n<function=put>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>put\n<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    }
    return parser(form, [tool(parameters)])(texts[form])["tool_calls"][0]["function"]["arguments"][name]


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_have_the_types_of_a_pydantic_model(form: str, name: str) -> None:
    for value, expected in WRITTEN[name]:
        made = read(form, Arguments.model_json_schema(), name, value)
        assert made == expected and type(made) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("deep", '{"x": 1}', {"x": 1}),
        ("again", "1", "1"),
        ("nowhere", "1", "1"),
        ("narrowed", "1", 1),
        ("one", "null", None),
        ("listed", "[1]", [1]),
        ("const", "3", 3),
        ("named", "3", "3"),
        ("nullable", "3", 3),
        ("true", "3", "3"),
        ("contradictory", "1", 1),
        ("other", "3", 3),
    ],
)
def test_references_and_joined_schemas(name: str, value: str, expected: Any) -> None:
    for schema in (
        REFERRED,
        {"$ref": "#/$defs/Whole", "$defs": {"Whole": REFERRED}, "definitions": REFERRED["definitions"]},
    ):
        made = read("qwen3_coder", schema, name, value)
        assert made == expected and type(made) is type(expected)


def test_schemas_that_are_none() -> None:
    for schema in (
        None,
        [],
        {"properties": []},
        {"properties": {"x": []}},
        {"allOf": 3, "properties": {"x": {"enum": 3}}},
    ):
        assert read("glm45", schema, "x", "3") == "3"


def test_references_that_branch_take_little_time() -> None:
    names = [f"n{i}" for i in range(60)]
    branches = {name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    start = time.process_time()
    assert parameter_types({"$defs": branches, "properties": {"x": {"$ref": "#/$defs/n0"}}}).of("x") == frozenset()
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("point", {"x": 1}, {"x": 1}),
        ("point", '{"x": 1}', {"x": 1}),  # which some models write
        ("maybe", None, None),
        ("points", [], []),
        ("text", 7, "7"),
        ("label", 7, "7"),
        ("either", 7, 7),
        ("color", "red", "red"),
        ("level", "2", 2),
        ("anything", [1], [1]),
    ],
)
def test_tools_with_a_schema_get_its_types(name: str, given: Any, expected: Any) -> None:
    made = schema_tool(tool(Arguments.model_json_schema() | {"required": []}), print)
    assert made.checked({name: given}) == {name: expected}


def test_arguments_of_a_schema_with_choices() -> None:
    """The properties of every choice have types, those of several choices that of any; references are URIs."""
    one = {"properties": {"n": {"$ref": "#/$defs/a%20b/0"}, "x": {"type": "integer"}}}
    two = {"properties": {"x": {"type": "null"}, "o": {}}}
    types = parameter_types({"type": "object", "$defs": {"a b": [{"type": "integer"}]}, "oneOf": [one, two]})
    expected = {"n": frozenset({"integer"}), "x": frozenset({"integer", "null"}), "o": frozenset()}
    assert types.named == expected
    assert "oneOf" in schema_of("f", "", {"oneOf": [one, two]})["function"]["parameters"]


def test_numbers_are_finite() -> None:
    """Python's JSON has NaN and reads 1e400 as infinity, which a server of tools refuses."""
    made = schema_tool(tool({"properties": {"x": {"type": "number"}}}), print)
    for given in ("NaN", float("inf"), float("nan")):
        with pytest.raises(BadCall, match=r"^put: x: Input should be a finite number"):
            made.checked({"x": given})


@pytest.mark.parametrize(("name", "given"), [("point", "one"), ("points", {}), ("level", "low"), ("maybe", 3)])
def test_the_model_reads_that_an_argument_has_another_type(name: str, given: Any) -> None:
    made = schema_tool(tool(Arguments.model_json_schema() | {"required": []}), print)
    with pytest.raises(BadCall, match=f"^put: {name}: Input should be "):
        made.checked({name: given})
