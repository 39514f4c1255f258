"""Tools of a request: what is accepted, and what is refused by name."""

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.parsing.json_object import DEEPEST
from mmserve.parsing.toolbox import NO_PARAMETERS, read_toolbox


def tool(name="look", parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def nested(depth):
    return {"not": nested(depth - 1)} if depth else {}


def test_tools_may_be_called_unless_the_choice_is_none():
    tools = [tool(), tool("count", {"properties": {"x": {"type": "integer"}}})]
    box = read_toolbox(tools)
    assert (box.choice, box.parallel, box.shown) == ("auto", True, tuple(tools))
    assert box.schemas == {
        "look": NO_PARAMETERS,
        "count": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }
    assert read_toolbox(tools, "none").schemas is None
    assert read_toolbox(tools, "required", False).parallel is False


def test_no_tools_is_an_empty_box():
    for nothing in (None, []):
        assert read_toolbox(nothing, "auto").schemas is None


def test_a_named_tool_is_the_only_one():
    box = read_toolbox([tool(), tool("count")], {"type": "function", "function": {"name": "count"}})
    assert box.choice == "required"
    assert [t.name for t in box.callable] == ["count"]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("look", None, "tools"),
        ([tool(f"t{i}") for i in range(129)], None, "tools"),
        ([tool(parameters={"properties": {"x": nested(DEEPEST)}})], None, "tools[0].function.parameters"),
        (["look"], None, "tools[0]"),
        ([tool(), {"type": "web_search"}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool("no spaces")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool(None)], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(parameters="{}")], None, "tools[0].function.parameters"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], None, "tools[0].function.parameters.properties"),
        ([tool(parameters={"properties": {"a": 1}})], None, "tools[0].function.parameters.properties"),
        ([tool(parameters={"required": "a"})], None, "tools[0].function.parameters.required"),
        (None, "required", "tool_choice"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"type": "allowed_tools", "function": {"name": "look"}}, "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
    ],
)
def test_what_is_wrong_is_named(tools, choice, param):
    with pytest.raises(InvalidRequest) as refusal:
        read_toolbox(tools, choice)
    assert refusal.value.param == param
