"""A calculator by the `openai` package and its Responses: streamed, each call naming the response before it."""

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
TOOL = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


def main() -> None:
    client = OpenAI()
    items, before = [{"role": "user", "content": sys.argv[1]}], {}
    for _ in range(4):
        with client.responses.stream(model="policy", input=items, tools=[TOOL], **before) as stream:
            for _event in stream:
                pass
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            print(response.output_text)
            return
        results = [str(add(**json.loads(call.arguments))) for call in calls]
        items = [
            {"type": "function_call_output", "call_id": call.call_id, "output": result}
            for call, result in zip(calls, results, strict=True)
        ]
        before = {"previous_response_id": response.id}


if __name__ == "__main__":
    main()
