"""The notebooks of docs/tutorials/: run without Jupyter, cell by cell in one namespace.

    python tests/support/notebooks.py NOTEBOOK [--write]

Prints as JSON what each code cell printed. With --write the notebook gets these texts, and the figures that its cells
drew, as its outputs. It runs in the current folder, in which its cells write.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def code_of(notebook: Path) -> list[str]:
    """The text of each code cell."""
    return ["".join(cell["source"]) for cell in code_cells(json.loads(notebook.read_text()))]


def printed_in(notebook: Path) -> list[str]:
    """The texts that a notebook shows below its code cells."""
    return [text_of(cell["outputs"]) for cell in code_cells(json.loads(notebook.read_text()))]


def code_cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def text_of(outputs: list[Output]) -> str:
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def outputs_of(notebook: Path) -> Iterator[list[Output]]:
    """Run the code cells in order; what each printed, and the figures that it left open."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_of(notebook)):
        with redirect_stdout(io.StringIO()) as told:
            exec(compile(source, f"{notebook.name}, code cell {number}", "exec"), namespace)
        text = told.getvalue()
        outputs: list[Output] = (
            [{"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}] if text else []
        )
        for figure in map(plt.figure, plt.get_fignums()):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=80, metadata={"Software": None})
            data = {"image/png": base64.b64encode(file.getvalue()).decode()}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        plt.close("all")
        yield outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    path = given.notebook.resolve()
    found = list(outputs_of(path))
    print(json.dumps([text_of(outputs) for outputs in found]))
    if given.write:
        document = json.loads(path.read_text())
        for number, (cell, outputs) in enumerate(zip(code_cells(document), found, strict=True), start=1):
            cell |= {"execution_count": number, "outputs": outputs}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
