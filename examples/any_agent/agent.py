"""An agent that knows nothing of its training: it asks OpenAI's chat API and prints the answer.

Where to ask comes from OPENAI_BASE_URL and OPENAI_API_KEY, as everywhere; Headway sets both. Only the standard library,
so that it starts in a moment; agent_openai.py is the same with the `openai` package.
"""

import json
import os
import sys
from urllib.request import Request, urlopen


def main() -> None:
    question = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 24}
    request = Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps(question).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        print(json.load(response)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
