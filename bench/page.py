"""Make the HTML page of a measurement's figures again, of what it printed with --json.

python bench/page.py FIGURES.json PAGE.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from diloco.local.report import write_text
from lab.figures import ResultDocument, render_page


def main(figures: str, page: str) -> None:
    """Write the page. Raises OSError, ValueError and CommandError."""
    document = ResultDocument.model_validate_json(Path(figures).read_bytes())
    print(f"{write_text(Path(page), render_page(document))}: {document.title}")


if __name__ == "__main__":
    main(*sys.argv[1:])
