"""The helpers of the engines' tests are ours too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
