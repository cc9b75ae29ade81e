"""What vLLM's tests ask for on this machine is said beside the engine's."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "engine"))
