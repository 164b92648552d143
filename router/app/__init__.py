"""Applications on top of a body: command line, HTTP service, replay, report and storage."""
