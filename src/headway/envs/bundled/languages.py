"""Programs in several languages, run in a sandbox on inputs; what they answer comes back for judgement."""

import json
from dataclasses import dataclass
from typing import Any

from headway.sandboxes.sandbox import Sandbox


@dataclass(frozen=True)
class Language:
    """The file of a program, a command that builds it where one is needed, and one that runs it."""

    file: str
    run: tuple[str, ...]
    build: tuple[str, ...] = ()


LANGUAGES = {
    "python": Language("program.py", ("python3", "-I", "program.py")),
    "bash": Language("program.sh", ("bash", "program.sh")),
    "javascript": Language("program.js", ("node", "program.js")),
    "perl": Language("program.pl", ("perl", "program.pl")),
    "ruby": Language("program.rb", ("ruby", "program.rb")),
    "c": Language("program.c", ("./program",), ("cc", "-O1", "-o", "program", "program.c", "-lm")),
    "c++": Language("program.cpp", ("./program",), ("c++", "-O1", "-o", "program", "program.cpp")),
    "go": Language("program.go", ("./program",), ("go", "build", "-o", "program", "program.go")),
    "rust": Language("program.rs", ("./program",), ("rustc", "-O", "-o", "program", "program.rs")),
}

# It answers one line per case on a descriptor that printing does not reach. Code in it may write there as well: it
# would still have to know what to write.
_DRIVER = """
import json, os, sys
given = json.load(sys.stdin)
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "solution"}
exec(compile(given["code"], "solution.py", "exec"), space)
function = space[given["entry"]]
for case in given["cases"]:
    try:
        line = json.dumps([function(*case)])
    except BaseException as error:
        line = json.dumps(f"{type(error).__name__}: {error}")
    os.write(answers, line.encode() + b"\\n")
"""


async def run_cases(box: Sandbox, language: str, code: str, entry: str | None, inputs: list[Any]) -> list[Any]:
    """Answers by input, None where there is none: what `entry` returned, or what the program printed."""
    if entry is not None:
        return await _call_function(box, code, entry, inputs)
    known = LANGUAGES[language]
    await box.write(known.file, code.encode())
    if known.build and (await box.run(known.build)).exit_code:
        return [None] * len(inputs)
    answers: list[Any] = []
    for text in inputs:
        done = await box.run(known.run, stdin=str(text).encode())
        answers.append(done.stdout.strip() if done.exit_code == 0 else None)
    return answers


async def _call_function(box: Sandbox, code: str, entry: str, cases: list[Any]) -> list[Any]:
    given = json.dumps({"code": code, "entry": entry, "cases": cases}).encode()
    done = await box.run(["python3", "-I", "-c", _DRIVER], stdin=given)
    answers: list[Any] = []
    for line in done.stdout.splitlines()[: len(cases)]:
        try:
            answer = json.loads(line)
        except ValueError:
            break
        answers.append(answer[0] if isinstance(answer, list) and len(answer) == 1 else None)
    return answers + [None] * (len(cases) - len(answers))
