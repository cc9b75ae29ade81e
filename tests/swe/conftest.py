"""Parts of other folders' tests that these use: kinds of sandboxes, and an engine that answers by script."""

import sys
from pathlib import Path

for folder in ("sandboxes", "envs"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
