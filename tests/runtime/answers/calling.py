"""A chat template that shows tools and calls, and tools to call."""

from __future__ import annotations

from typing import Any

TEMPLATE = """{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls %}
<tool_call>
{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{% endfor %}
{%- for t in tools or [] %}{{ t | tojson }}
{% endfor %}assistant:"""


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool(
    "get_weather", "What the weather is.", city={"enum": ["Oslo", "Lima"]}, days={"type": "integer", "minimum": 1, "maximum": 9}
)
ALL = tool("get_weather_all", on={"type": "boolean"})
