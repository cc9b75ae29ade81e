"""The examples of docs/packages.md run."""

from doc_pages import ROOT, blocks


def test_the_example_of_playing_runs() -> None:
    examples = blocks(ROOT / "docs" / "packages.md", "python")
    assert examples
    for example in examples:
        exec(example, {})
