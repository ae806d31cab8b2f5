"""Tools, as OpenAI's API describes them; bodies of other APIs describe theirs so too."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from localllm.server.body import Body
from localllm.text.tool_schemas import without_nulls

ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
Parameters = Annotated[dict[str, Any], AfterValidator(without_nulls)]


class FunctionDefinition(Body):
    """A function that can be called, with the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """A tool; every tool is a function."""

    type: Literal["function"]
    function: FunctionDefinition

    @classmethod
    def of(cls, **function: Any) -> "ToolDefinition":
        """A tool by the fields of its function."""
        return cls(type="function", function=FunctionDefinition(**function))
