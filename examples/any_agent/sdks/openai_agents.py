"""A calculator by the `openai-agents` package, which speaks OpenAI's Responses."""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main() -> None:
    set_tracing_disabled(True)  # it would send what the agent does to OpenAI
    agent = Agent(name="calculator", instructions="Answer with a number.", model="policy", tools=[add])
    print(Runner.run_sync(agent, sys.argv[1]).final_output)


if __name__ == "__main__":
    main()
