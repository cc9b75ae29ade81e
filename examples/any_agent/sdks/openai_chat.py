"""A calculator by the `openai` package and its Chat Completions, until the model no longer calls its tool."""

import json
import sys

from openai import OpenAI


def add(a: int, b: int) -> int:
    return a + b


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}


def main() -> None:
    client = OpenAI()
    messages = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(4):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not reply.tool_calls:
            print(reply.content)
            return
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


if __name__ == "__main__":
    main()
