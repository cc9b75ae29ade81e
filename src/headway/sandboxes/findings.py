"""The kinds of sandboxes that this machine can run, for `headway doctor`."""

from collections.abc import Iterator

from headway.monitor.doctor.finding import Finding
from headway.sandboxes.kinds import available_kinds
from headway.sandboxes.local.cgroups import Cgroups


def check_sandboxes() -> Iterator[Finding]:
    """Yield one line for what can be used, and one where limits do not hold for a sandbox as a whole."""
    problems = available_kinds()
    usable = [kind for kind, problem in problems.items() if not problem and kind != "process"]
    if not usable:
        text = "none: the environments code and terminal, and agents in sandboxes, can't run"
        yield Finding("sandboxes", "note", text, problems["bubblewrap"])
        return
    yield Finding("sandboxes", "ok", ", ".join(usable))
    if "bubblewrap" in usable and (problem := Cgroups().problem):
        text = f"no control groups for them ({problem}): memory and processes are bounded by rlimits only"
        yield Finding("sandboxes", "warning", text, "start the run with `systemd-run --user --scope -p Delegate=yes`")
