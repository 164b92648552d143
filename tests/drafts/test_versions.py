"""Versions are adopted between steps: exactly what the registry names is what is served."""

import torch

from drafts.errors import UnknownNameError
from drafts.mixture import Mixture
from drafts.registry import Registry
from drafts.versions import VersionFollower


class Shelf:
    def __init__(self) -> None:
        self.served: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, domain, tensors):
        self.served[domain] = tensors


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


def follower() -> tuple[Registry, Shelf, VersionFollower]:
    """A registry in which ``math`` and ``base`` have what they were born with."""
    registry, shelf = Registry(None), Shelf()
    for domain in ("math", "base"):
        registry.publish(domain, weights(0.0), reason="born")
    versions = VersionFollower(registry, shelf)
    assert versions.adopt() == []
    return registry, shelf, versions


def test_a_published_version_is_served_from_the_next_border():
    registry, shelf, versions = follower()
    registry.publish("math", weights(1.0), reason="better", score=0.5)
    assert versions.served("math") == 0
    swaps = versions.adopt()
    assert [(s.domain, s.old, s.new) for s in swaps] == [("math", 0, 1)]
    assert shelf.served["math"]["w"].tolist() == [1.0, 1.0]
    assert versions.served("math") == 1


def test_nothing_is_loaded_twice():
    registry, shelf, versions = follower()
    registry.publish("math", weights(1.0), reason="better")
    versions.adopt()
    shelf.served.clear()
    assert versions.adopt() == []
    assert shelf.served == {}


def test_a_rollback_is_a_swap_back():
    registry, shelf, versions = follower()
    registry.publish("math", weights(1.0), reason="a")
    versions.adopt()
    registry.publish("math", weights(2.0), reason="b")
    versions.adopt()
    registry.rollback("math")
    assert [(s.old, s.new) for s in versions.adopt()] == [(2, 1)]
    assert shelf.served["math"]["w"].tolist() == [1.0, 1.0]


def test_an_inherited_version_is_loaded_without_a_swap():
    registry, shelf, versions = follower()
    registry.publish("base", weights(3.0), reason="a")
    registry.clone("base", "recipes")
    swapped = {swap.domain for swap in versions.adopt()}
    assert swapped == {"base"}
    assert shelf.served["recipes"]["w"].tolist() == [3.0, 3.0]


def test_a_new_domain_of_an_old_name_begins_anew():
    registry, _, versions = follower()
    registry.publish("math", weights(1.0), reason="a")
    versions.adopt()
    registry.drop("math")
    versions.forget("math")
    assert versions.served("math") == 0


def test_a_version_waits_for_its_domain_and_is_served_when_that_is_added(caplog):
    """After a restart the registry knows domains that are registered again a little later."""
    registry = Registry(None)
    registry.publish("base", weights(0.0), reason="born")
    registry.publish("ships", weights(0.0), reason="born")
    registry.publish("ships", weights(1.0), reason="better")
    known = {"base"}

    class Bank(Shelf):
        def load(self, domain, tensors):
            if domain not in known:
                raise UnknownNameError("domain", domain, sorted(known))
            super().load(domain, tensors)

    shelf = Bank()
    mixture = Mixture({}, versions=VersionFollower(registry, shelf))
    assert mixture.swap() == []
    assert not caplog.text
    known.add("ships")
    mixture.add_domain("ships", "base")
    assert [(swap.domain, swap.new) for swap in mixture.swap()] == [("ships", 1)]
    assert shelf.served["ships"]["w"].tolist() == [1.0, 1.0]
    assert mixture.swap() == []
