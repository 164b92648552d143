"""Every script of the benchmarks starts: one of them bears the name of a package that all import."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())


def test_there_are_scripts() -> None:
    assert {"drafts", "peers", "floor", "trunk", "memories"} <= {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_says_what_it_takes(script: Path) -> None:
    found = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "--json" in found.stdout
