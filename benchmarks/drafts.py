"""What does each part of the drafts add, do they specialise, and what do more domains cost?

Three parts, of which ``--arms-only`` and ``--domains-only`` choose:

- ``arms``: the request's own text alone (``lookup``), with the domain's memory (``memory``), with the
  shared head (``trunk``), with experts that learn (``experts``), with token trees (``trees``), the last
  without learning experts (``trees_frozen``), and one draft shared by all traffic with the same sources,
  bytes and budget (``shared``, its rate tried on the first requests). All arms stand around one loaded
  target, each with a state of its own that begins empty, and serve the same blocks of requests in turn.
  Every figure comes from a request that is counted before it teaches.
- ``matrix``: acceptance of every expert and memory on the requests of every label, by drafts copied
  before the last quarter of the requests and judged on that quarter.
- ``domains``: milliseconds of a draft step of 16 rows with 4, 16 and 64 registered domains.

    python benchmarks/drafts.py --traffic mix.jsonl --limit 410 --json out/drafts.json

The last line is JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This file bears the name of a package and comes first on the path of every script in its folder.
HERE = str(Path(__file__).parent)
sys.path = [*(path for path in sys.path if path != HERE), HERE]

if __name__ == "__main__":
    from draft_arms.main import main

    main(__doc__)
elif __name__ == "drafts":
    # Asked for by a script beside this one, which means the package; imports take it from sys.modules.
    del sys.modules["drafts"]
    import drafts  # noqa: F401
