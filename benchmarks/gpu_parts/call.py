"""Calls a part's function in this process: `python -m gpu_parts.call MODULE FUNCTION CALLS RESULTS`.

CALLS is JSON: lists of arguments by name. For each a line of JSON is added to the file RESULTS, with what the function
returned or with what it raised; one that fails stops none of the others.
"""

import gc
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    module, name, calls, file = sys.argv[1:]
    function = getattr(importlib.import_module(f"gpu_parts.{module}"), name)
    with Path(file).open("a") as results:
        for call, arguments in json.loads(calls).items():
            results.write(json.dumps({"call": call} | _outcome(function, arguments)) + "\n")
            results.flush()
            _forget()


def _outcome(function: Any, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _forget() -> None:
    """Let the next call begin with an empty GPU."""
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
