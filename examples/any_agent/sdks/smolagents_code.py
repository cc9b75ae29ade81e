"""A calculator by `smolagents`: its CodeAgent writes Python, and may call the tool in it."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def main() -> None:
    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = CodeAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
    print(agent.run(sys.argv[1]))


if __name__ == "__main__":
    main()
