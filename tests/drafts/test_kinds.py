from __future__ import annotations

import subprocess
import sys

import pytest

from drafts import kinds
from drafts.errors import InvalidValueError, UnknownNameError
from drafts.kinds.base import Source


@pytest.mark.parametrize("name", kinds.names())
def test_every_registered_kind_is_a_source_of_that_name(name: str) -> None:
    found = kinds.source_class(name)
    assert issubclass(found, Source)
    assert found.name == name


def test_a_miss_names_the_field_and_the_known_kinds() -> None:
    with pytest.raises(UnknownNameError, match=r"sources\[0\].*'lokup'.*known: eagle, lookup, model, ngram"):
        kinds.source_class("lokup", "sources[0]")


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="lookup"):
        kinds.register("lookup", "somewhere:Else")


def test_listing_kinds_imports_no_heavy_library() -> None:
    code = "import sys, drafts.kinds as k; k.source_class('ngram'); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
