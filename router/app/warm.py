"""Builds what a first start would otherwise wait for: the model cache of the embedded target."""

from __future__ import annotations

import shutil
import sys


def warm(*, force: bool = False) -> None:
    """Convert the embedded target unless that is done; ``force`` converts it again (half a minute)."""
    from osd.serve.embedded import embedded_folder

    folder = embedded_folder()
    if force:
        shutil.rmtree(folder)
        folder = embedded_folder()
    print(f"embedded target: {folder}")


if __name__ == "__main__":
    warm(force="--force" in sys.argv[1:])
