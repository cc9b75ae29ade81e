"""Environment variables of workers: those that programs need to run, not the user's secrets."""

import os
import re
from collections.abc import Mapping, Sequence

_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CONDA_PREFIX"
    r"|(LD|DYLD)_LIBRARY_PATH|PYTHON\w*|XDG_\w+|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(http|https|all|no)_proxy|(OMP|MKL|OPENBLAS|CUDA|NVIDIA|TORCH|TRITON|HF|HEADWAY|TOKENIZERS|COVERAGE)_\w+"
    r"|SYSTEMROOT|NIX_\w+",
    re.IGNORECASE,
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY$|APIKEY|API_KEY", re.IGNORECASE)


def worker_variables(pass_env: Sequence[str], variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the usual ones of `variables` without those that look like secrets, and those that `pass_env` names."""
    usual = {name for name in variables if _USUAL.fullmatch(name) and not _SECRET.search(name)}
    wanted = usual | set(pass_env)
    return {name: value for name, value in variables.items() if name in wanted and name != "HEADWAY_TOKEN"}
