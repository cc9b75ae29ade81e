"""Calls one part's function in this process: `python -m gpu_parts.call MODULE FUNCTION ARGUMENTS RESULT`.

ARGUMENTS is a JSON list; what the function returns is written to the file RESULT as JSON.
"""

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    module, function, arguments, file = sys.argv[1:]
    result = getattr(importlib.import_module(f"gpu_parts.{module}"), function)(*json.loads(arguments))
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
