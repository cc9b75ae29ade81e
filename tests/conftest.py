"""Settings of the whole suite."""

import os

from hypothesis import settings

# Everywhere else every run draws new examples; a submission's verdict must not depend on luck.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
