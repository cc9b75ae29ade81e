"""The dashboard's page of a step: what its batch was made of, what was dropped meanwhile, and who waited for whom."""

from typing import Any

from headway.base.errors import UsageError
from headway.monitor.dashboard.api import Handler, Query
from headway.monitor.dashboard.catalog import RunData
from headway.replay.lives import read_history
from headway.replay.why import explain_step

MOST_BYTES = 32 << 20
"""The largest journal that the page reads, anew each time. Of a larger one the command tells the same."""


def step_page(view: RunData, query: Query) -> Any:
    """Return which steps the journal has and the words for one, by default the newest; or why there are none."""
    paths = view.paths
    if paths.journal.exists() and paths.journal.stat().st_size > MOST_BYTES:
        return {"problem": f"The journal is too large for this page: headway replay {paths.root} --step N --why"}
    try:
        history = read_history(paths)
        if not history.steps:
            return {"problem": "No batch was sent yet."}
        step = query.integer("step", history.steps[-1])
        lines = explain_step(paths, history, step)
    except UsageError as error:
        return {"problem": str(error)}
    return {"first": history.steps[0], "last": history.steps[-1], "step": step, "lines": lines}


ROUTES: dict[str, Handler] = {"/steps": step_page}
