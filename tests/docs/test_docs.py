"""The documentation holds together: pages are indexed, links lead somewhere, files and names of the code exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from doc_pages import FENCE, PAGES, ROOT, blocks, name, spans

CODE = ("src", "tests", "benchmarks", "examples")
SOURCE = re.compile(r"(?<![\w/.*$<{-])(?:[\w-]+/)*[\w-]+\.(?:py|c|js)(?![\w/*(])")
IN_A_FOLDER = re.compile(r"(?<![\w/.-])(?:src|tests|benchmarks|examples|docs)/[\w/.-]*\w")
OF_THE_READER = re.compile(r"(my_\w+|shout|reverse|FILE|file|path)\.py")
"""Files that the reader writes."""
KINDS = ("environments", "algorithms", "advantages", "losses", "filters", "gates", "curricula", "samplers")
GROUPS = {f"headway.{kind}" for kind in (*KINDS, "optimizers", "schedules", "renderers", "families")}
"""Names with dots that are not modules: entry-point groups."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = [
        *re.findall(r"\]\(([^)\s]+)\)", text),
        *re.findall(r"<(?:img|a|source) [^>]*(?:src|srcset|href)=\"([^\"]+)\"", text),
    ]
    targets = [target.partition("#")[0] for target in links]
    local = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)\s:#]*)#([\w-]+)\)", FENCE.sub("", page.read_text())):
        text = ((page.parent / target) if target else page).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], (
            target,
            heading,
        )


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    folder = ROOT / "docs"
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if f"({page})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    code = [file for folder in CODE for file in (ROOT / folder).rglob("*") if "__pycache__" not in file.parts]
    files = {str(file.relative_to(ROOT)) for file in code} | {file.name for file in ROOT.iterdir()}
    texts = [*spans(page), *blocks(page, "bash", "sh", "")]
    named = {file for text in texts for pattern in (SOURCE, IN_A_FOLDER) for file in pattern.findall(text)}
    missing = [file for file in named if not OF_THE_READER.fullmatch(file) and not _exists(file, page, files)]
    assert missing == []


def _exists(file: str, page: Path, files: set[str]) -> bool:
    """A file is named from the root, from the page's folder, or by the end of its path in the code."""
    if (ROOT / file).exists() or (page.parent / file).exists():
        return True
    return any(known == file or known.endswith(f"/{file}") for known in files)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_of_the_code_exist(page: Path) -> None:
    text = re.sub(r"https?://\S+", "", page.read_text())
    dotted = set(re.findall(r"(?<![\w./-])headway(?:\.[A-Za-z_]\w*)+", text)) - set(GROUPS)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headway"):
                dotted |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert [full for full in sorted(dotted) if not _resolves(full)] == []


def _resolves(full: str) -> bool:
    parts = full.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            source = (ROOT / "src").joinpath(*parts[:length]).with_suffix(".py")
            if source.exists() and not (error.name or "").startswith("headway"):  # of an extra that is not installed
                return _defines(source, parts[length:])
            continue
        return all(hasattr(found, part) and (found := getattr(found, part)) is not None for part in parts[length:])
    return False


def _defines(source: Path, names: list[str]) -> bool:
    body = ast.parse(source.read_text()).body
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return not names or names[0] in defined


def test_the_page_of_vllm_lists_every_private_point() -> None:
    source = ast.parse((ROOT / "src/headway/inference/vllm/internals.py").read_text())
    functions = {node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)) == functions


def test_classes_of_the_glossary_exist() -> None:
    defined = {
        node.name
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    meanings = re.findall(r"`([A-Z]\w+|[a-z]+_\w+)`(?=[),]| and|:)", (ROOT / "docs/glossary.md").read_text())
    named = {word for word in meanings if word[0].isupper() or word.startswith(("next_", "capture_"))}
    assert sorted(named - defined) == []
    assert len(named) > 40


@pytest.mark.parametrize("page", ["models.md", "algorithms.md", "training.md"])
def test_examples_in_python_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.models.ops.registry.OPS", {})  # an example registers an operation
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs" / page, "python"):
        if '"cuda"' not in block.replace('# device="cuda"', ""):
            exec(block.replace("/tmp/", f"{tmp_path}/"), names)
    assert len(names) > 1


AVOIDED = ("to the bit", "last words", "in the air", "came of it", "Learned is", "Held back is", "nobody's")
"""Phrases that the documentation once had; plain ones took their place."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_are_in_plain_words(page: Path) -> None:
    text = " ".join(page.read_text().split())
    assert [phrase for phrase in AVOIDED if phrase in text] == []
