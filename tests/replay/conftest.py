"""Replays are tested on simulated orchestrators and on whole runs, whose helpers live with their own tests."""

import sys
from pathlib import Path

for folder in ("orchestrator", "e2e"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
