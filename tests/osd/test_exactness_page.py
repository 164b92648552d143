"""docs/exactness.md names a test for every claim; those names must lead somewhere."""

import re
from fnmatch import fnmatch
from pathlib import Path

from osd.serve.ties import BOUNDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`((?:osd|router)/test_\w+\.py)(?:::(\w+\*?))?`", PAGE)
    assert len(named) > 10
    for file, name in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        tests = re.findall(r"def (test_\w+)", text)
        assert any(fnmatch(test, name or "test_*") for test in tests), f"{file}::{name}"


def test_every_file_it_names_exists_and_the_bounds_are_those_of_the_code() -> None:
    for file in re.findall(r"`((?:osd|benchmarks|docs)/(?:serve/)?\w+\.(?:py|md))`", PAGE):
        assert (ROOT / file).exists() or (ROOT / "tests" / file).exists(), file
    stated = re.findall(r"^\| (float32|float16|bfloat16) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert {name: float(value) for name, value in stated} == {
        str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items() if dtype.itemsize < 8
    }
