"""An agent that knows nothing of its training: the `openai` package, a prompt, an answer on stdout.

The package reads OPENAI_BASE_URL and OPENAI_API_KEY from the environment; Headway sets both.
"""

import sys

from openai import OpenAI


def main() -> None:
    word = sys.argv[1]
    client = OpenAI()
    stream = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": word}], max_tokens=24, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="")
    print()


if __name__ == "__main__":
    main()
