"""The example notebook, executed cell by cell in a real kernel."""

from pathlib import Path

import pytest

import headway

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "vowels.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_learns(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", "pandas"):
        pytest.importorskip(package, reason="needs nbclient, ipykernel and pandas")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    try:
        client.execute()  # raises on the first cell that fails
    finally:
        for record in tmp_path.glob("outputs/*/run.json"):
            headway.Run(record.parent).stop()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "share of vowels:" in printed
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    assert any("step" in data.get("text/plain", "") and "16 of 16" in data.get("text/plain", "") for data in shown)
    assert any("<table" in data.get("text/html", "") for data in shown)
    assert len(list(tmp_path.glob("outputs/*/run.json"))) == 1
