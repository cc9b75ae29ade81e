"""A calculator by the `anthropic` package, streamed, until the model no longer uses its tool."""

import sys

from anthropic import Anthropic


def add(a: int, b: int) -> int:
    return a + b


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}


def main() -> None:
    client = Anthropic()
    messages = [{"role": "user", "content": sys.argv[1]}]
    for _ in range(4):
        with client.messages.stream(model="policy", max_tokens=64, messages=messages, tools=[TOOL]) as stream:
            reply = stream.get_final_message()
        if reply.stop_reason != "tool_use":
            print("".join(block.text for block in reply.content if block.type == "text"))
            return
        uses = [block for block in reply.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))} for use in uses]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]


if __name__ == "__main__":
    main()
