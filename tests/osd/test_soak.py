"""A short soak: requests of every fate share one engine, and nothing leaks and no answer is wrong."""

import logging

from soak import FATES, Soak


def test_hundreds_of_requests_of_every_fate_leak_nothing_and_survivors_are_exact():
    logging.disable(logging.CRITICAL)
    try:
        report = Soak(300, seed=1).run()
    finally:
        logging.disable(logging.NOTSET)
    assert set(report["fates"]) == set(FATES)
    assert set(report["finishes"]) == {"stop", "length", "cancelled", "timeout", "error", "refused"}
    assert report["prefix_cache"]["tokens_reused"] > 500
    assert report["versions"] >= 2
