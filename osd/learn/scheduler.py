"""Learning while serving: scores finished requests, trains experts, publishes; in small slices, in budget."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drafts.bank import Expert
from drafts.errors import CheckpointError, PolydraftError
from drafts.expert_key import FIRST_KIND, expert_key, split_key
from drafts.version import Version
from osd.learn.budget import Budget
from osd.learn.buffer import DomainBuffer
from osd.learn.config import LearnConfig
from osd.learn.cross import CrossScorer
from osd.learn.distill import Pending, encode, is_right, make_record, pending, score
from osd.learn.domain import DomainLearning
from osd.learn.generalist import Generalist, joined
from osd.learn.guard import Verdict
from osd.learn.head import TrainableHead
from osd.learn.losses import draft_index
from osd.learn.publish import Publisher
from osd.learn.update import Update
from osd.types import Event, FinishedRecord

log = logging.getLogger(__name__)

WAITING = 4
"""Requests waiting to be scored beyond which no evidence is collected for more."""


@dataclass
class _Scoring:
    """A request whose encoding is done and whose score is not."""

    item: Pending
    hidden: torch.Tensor


class LearningScheduler:
    """Implements ``osd.ports.Worker`` and ``osd.ports.Observer``. All of it runs on the engine's thread.

    A request is scored with the served version *before* it may train anything, so agreement per version is
    an honest forecast (prequential evaluation), and at a few positions with the served version of one other
    domain, for the cross-acceptance matrix. Then the domain with most to gain, by traffic times headroom, is
    updated, judged by the guard and published.

    Args:
        heads: The drafts that learn, by kind. Buffers, versions and training are kept per expert, that is by
            :func:`drafts.expert_key.expert_key`.
        registry: Where versions are published.
        config: Settings.
        overrides: Settings of the domains that have their own; the budget and the queue are shared.
        on_event: Called with every event.
        clock: Seconds, for the budget.
        base: Domain whose expert learns from all, see :class:`osd.learn.generalist.Generalist`.
    """

    def __init__(
        self,
        heads: Mapping[str, TrainableHead],
        registry: Publisher,
        config: LearnConfig,
        on_event: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.perf_counter,
        overrides: Mapping[str, LearnConfig] | None = None,
        base: str = "base",
    ) -> None:
        self.heads = dict(heads)
        self.registry = registry
        self.config = config
        self.overrides = dict(overrides or {})
        self.on_event = on_event
        self.budget = Budget(config.budget_share)
        self.cross = CrossScorer(self.head_of, self._experts, self.served, config.seed)
        self.domains: dict[str, DomainLearning] = {}
        self.generalist = Generalist(base) if config.generalist else None
        self.counts = {
            "updates": 0,
            "published": 0,
            "rolled_back": 0,
            "rejected": 0,
            "followed": 0,
            "scored": 0,
            "skipped": 0,
        }
        self._clock = clock
        self._queue: deque[Pending] = deque(maxlen=config.queue_records)
        self._scoring: _Scoring | None = None
        self._update: Update | None = None
        self._train_next = False
        self._to_draft = {
            kind: draft_index(head.token_ids, head.vocab_size) for kind, head in self.heads.items()
        }

    def take(self, record: FinishedRecord) -> None:
        """Queue a finished request for each of its domain's experts; cheap."""
        config = self.of(record.domain)
        if not self.config.enabled or not config.enabled:
            return
        for kind, head in self.heads.items():
            if not head.has(record.domain):
                continue
            key = expert_key(record.domain, kind)
            item = pending(record, config.buffer, key, head.needs_features, head.context)
            if item is None:
                self.counts["skipped"] += 1
            else:
                self._queue.append(item)

    @property
    def wants_records(self) -> bool:
        """Whether one more request would be scored soon; evidence for others costs time for nothing."""
        return self.config.enabled and len(self._queue) < WAITING and self.budget.balance >= 0.0

    def work(self, busy_seconds: float, idle: bool) -> bool:
        """One slice of a few milliseconds, if the budget allows; whether anything was done."""
        self.budget.earn(busy_seconds)
        if not self.config.enabled or not (idle or self.budget.allows):
            return False
        start = self._clock()
        with torch.no_grad():
            done = self._slice()
        if done:
            self.budget.spend(self._clock() - start, idle)
        return done

    def drain(self) -> None:
        """Work until nothing is left; for shutdown and for tests."""
        while self.work(0.0, idle=True):
            pass

    def of(self, name: str) -> LearnConfig:
        """The settings of a domain, or of an expert's."""
        return self.overrides.get(split_key(name)[0], self.config)

    def domain(self, name: str) -> DomainLearning:
        """The learning state of an expert, made on first sight."""
        if name not in self.domains:
            seed = self.config.seed + len(self.domains)
            head = self.heads.get(split_key(name)[1])
            trunk = None if head is None else head.trunk_fingerprint
            self.domains[name] = DomainLearning(DomainBuffer(self.of(name).buffer, seed, trunk))
        return self.domains[name]

    def served(self, name: str) -> Expert:
        """The served expert of a domain."""
        return self._served(name)[0]

    def add_domain(self, name: str, parent: str | None = None) -> None:
        """A new domain, inheriting a copy of its parent's buffer."""
        if parent is None:
            return
        for kind in self.heads:
            key, source = expert_key(name, kind), expert_key(parent, kind)
            if key not in self.domains and source in self.domains:
                self.domains[key] = DomainLearning(self.domains[source].buffer.copy())

    def drop_domain(self, name: str) -> None:
        """Forget a domain: buffer, training state, queued requests and a running update."""
        for kind in self.heads:
            self.domains.pop(expert_key(name, kind), None)
        self.cross.forget(name)
        if self.generalist is not None:
            self.generalist.forget(name)
        self._let_go(name)

    def purge(self, name: str) -> None:
        """Forget a domain's records, those on their way among them; what was learned stays in the weights."""
        for kind in self.heads:
            domain = self.domains.get(expert_key(name, kind))
            if domain is not None:
                domain.buffer.purge()
                domain.newest = None
                domain.since_update = domain.positions_since_update = 0
        self.cross.drop_waiting(name)
        self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Drop a domain's queued requests, the one that is being scored and a running update."""
        kept = [item for item in self._queue if split_key(item.domain)[0] != name]
        self._queue = deque(kept, maxlen=self.config.queue_records)
        if self._scoring is not None and split_key(self._scoring.item.domain)[0] == name:
            self._scoring = None
        if self._update is not None and split_key(self._update.name)[0] == name:
            self._update = None

    def stats(self) -> dict[str, object]:
        """Counters, share of busy time, and figures per domain; safe from any thread."""
        per_domain = {name: domain.figures() for name, domain in dict(self.domains).items()}
        return {
            **self.counts,
            "share_of_busy_time": self.budget.share,
            "seconds": self.budget.spent,
            "idle_seconds": self.budget.idle_spent,
            "queued": len(self._queue),
            "domains": per_domain,
        }

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Buffers per domain as tensors."""
        return {name: domain.buffer.state() for name, domain in self.domains.items()}

    def load_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Restore buffers; one that is damaged or belongs to another trunk starts anew, with a warning."""
        for name, tensors in state.items():
            head = self.heads.get(split_key(name)[1])
            try:
                self.domain(name).buffer.load_state(tensors, None if head is None else head.width)
            except CheckpointError as error:
                log.warning("domain %s: its buffer starts anew: %s", name, error)

    def history(self) -> dict[str, Any]:
        """Counters, agreement per version and the matrix, as JSON."""
        live = {name: domain.live_state() for name, domain in self.domains.items()}
        followed = {name: domain.followed for name, domain in self.domains.items()}
        cross = self.cross.matrix.state()
        return {"counts": dict(self.counts), "live": live, "followed": followed, "cross": cross}

    def load_history(self, history: Mapping[str, Any]) -> None:
        """Restore :meth:`history`; domains without a draft here are left out."""
        self.counts.update({name: int(n) for name, n in history.get("counts", {}).items()})
        for name, versions in history.get("live", {}).items():
            if self._has(name):
                self.domain(name).load_live(versions)
        for name, number in history.get("followed", {}).items():
            if self._has(name):
                self.domain(name).followed = int(number)
        self.cross.matrix.load_state(history.get("cross", {}), self._experts())

    def _slice(self) -> bool:
        """Alternate between scoring and training, whichever has something to do."""
        self._train_next = not self._train_next
        first, second = (self._train, self._score) if self._train_next else (self._score, self._train)
        return first() or second()

    def _score(self) -> bool:
        """Encode the next request, score the one that was encoded, or score it with another expert."""
        if self.cross.work():
            return True
        if self._scoring is None:
            if not self._queue:
                return False
            item = self._queue.popleft()
            if self._has(item.domain):
                self._scoring = _Scoring(item, encode(self.head_of(item.domain), item))
            return True
        item, hidden = self._scoring.item, self._scoring.hidden
        self._scoring = None
        if not self._has(item.domain):
            return True
        head, to_draft = self.head_of(item.domain), self.map_of(item.domain)
        expert, version = self._served(item.domain)
        logits = head.logits(hidden, expert)
        emitted = item.emitted.to(logits.device)
        domain = self.domain(item.domain)
        right = is_right(logits, emitted, head.token_ids)
        record = make_record(item, hidden, right, domain.buffer.arrived, version)
        if record is None:
            self._reject(item.domain, "a record held NaN or infinity and was dropped", {})
            return True
        held = domain.observe(record)
        general = item.domain if self.generalist is None else self.generalist.of(item.domain)
        if general != item.domain and self._has(general):
            self.domain(general).count(record, held)
        if split_key(item.domain)[1] == FIRST_KIND:
            self.cross.take(item, hidden, right)
        self.counts["scored"] += 1
        domain.follow(version, expert)
        if domain.watch is not None:
            self._watch(item.domain, domain, float(score(head, record, expert, to_draft).agreement.mean()))
        return True

    def _experts(self) -> list[str]:
        """Domains with an expert of the first kind, whose hidden states serve all of them."""
        return [key for key in self.registry.domains() if split_key(key)[1] == FIRST_KIND and self._has(key)]

    def _watch(self, name: str, domain: DomainLearning, served_score: float) -> None:
        """Compare the served version with the one before on the newest record; roll back on a fall."""
        watch, guard = domain.watch, self.of(name).guard
        assert watch is not None
        newest = domain.newest
        assert newest is not None
        head, to_draft = self.head_of(name), self.map_of(name)
        before = float(score(head, newest, watch.expert, to_draft).agreement.mean())
        watch.gains.append(served_score - before)
        if watch.has_fallen(guard.min_watch_records, guard.rollback_z):
            mean = sum(watch.gains) / len(watch.gains)
            domain.watch = None
            domain.learner = None
            numbers = {"version": watch.version, "gain": mean, "records": len(watch.gains)}
            reason = (
                f"version {watch.version} agrees less often than version {watch.previous} on live traffic"
            )
            try:
                self.registry.rollback(name)
            except PolydraftError as error:
                self._tell("rollback_failed", name, f"{reason}, but stays: {error}", numbers)
                return
            self.counts["rolled_back"] += 1
            self._tell("rollback", name, reason, numbers)
            self._changed(name)
        elif len(watch.gains) >= guard.watch_records:
            domain.watch = None

    def _train(self) -> bool:
        """Advance the running update, or start one for the domain with most to gain."""
        if self._update is None:
            if self._catch_up():
                return True
            name = self._due()
            if name is None:
                return False
            self._update = self._begin(name)
            self.counts["updates"] += 1
            return True
        update = self._update
        if not self._has(update.name):
            self._update = None
            return True
        if update.advance():
            return True
        self._update = None
        self._conclude(update)
        return True

    def _begin(self, name: str) -> Update:
        """An update of an expert; the generalist's reads all buffers, and challenges those that left it."""
        domain, (expert, version) = self.domain(name), self._served(name)
        buffers = self._read_by(name)
        rival = None
        if self.generalist is not None and domain.challenged:
            rival, domain.challenged = self.served(self.generalist.of(name)), False
        return Update(
            self.head_of(name),
            name,
            domain,
            expert,
            version,
            self.of(name),
            self.map_of(name),
            joined(buffers) if buffers else None,
            rival,
        )

    def _read_by(self, name: str) -> list[DomainBuffer]:
        """Buffers that the generalist learns from, its own first; none where a domain learns for itself."""
        if self.generalist is None or not self.generalist.owns(name):
            return []
        kind = split_key(name)[1]
        others = [d.buffer for key, d in self.domains.items() if key != name and split_key(key)[1] == kind]
        return [self.domain(name).buffer, *others]

    def _catch_up(self) -> bool:
        """Let one domain that follows the generalist serve its newest version; whether there was one."""
        if self.generalist is None or (name := self.generalist.next_behind()) is None:
            return False
        if self._has(name):
            self._follow(name, "until its own is better on what it holds back")
        return True

    def _follow(self, name: str, reason: str, score: float | None = None) -> None:
        """Serve a domain with the generalist's version."""
        assert self.generalist is not None
        version, served = self.registry.current(self.generalist.of(name)), self.registry.current(name)
        if version is None or served is None:
            return
        domain = self.domain(name)
        text = f"version {version.number} of {split_key(version.domain)[0]}, {reason}"
        try:
            taken = self.registry.publish(
                name, version.tensors, reason=text, score=score, parent=served.number
            )
        except PolydraftError as error:
            domain.followed = -1
            self._tell("update_rejected", name, f"{text}: {error}", {})
            return
        domain.followed, domain.learner = taken.number, None
        self.counts["followed"] += 1
        self._tell("publish", name, text, {"version": taken.number})

    def _changed(self, name: str) -> None:
        """Where the generalist serves another version, tell those that follow it."""
        if self.generalist is not None and self.generalist.owns(name):
            current = {key: self.registry.current(key) for key in self.registry.domains()}
            served = {key: version.number for key, version in current.items() if version is not None}
            self.generalist.changed(name, served, self.domains)

    def _conclude(self, update: Update) -> None:
        """Publish a finished update or say why not."""
        verdict = update.verdict()
        _, version = self._served(update.name)
        numbers: dict[str, float] = {
            "served": verdict.served,
            "candidate": verdict.candidate,
            "overlap_gain": verdict.overlap_gain,
            "positions": verdict.positions,
        }
        if version != update.version:
            self._reject(update.name, "another version was published meanwhile", numbers)
        elif update.failures:
            self._reject(update.name, f"{update.failures} steps were not finite", numbers)
        elif _wins(rival := update.rival_verdict(), verdict):
            assert rival is not None
            self._follow(update.name, "better than its own on what it holds back", rival.candidate)
        elif not verdict.accepted:
            if verdict.hopeless:
                update.domain.learner = None
            self._reject(update.name, "worse than the served version on held-back positions", numbers)
        else:
            reason = f"held-back agreement {verdict.served:.3f} -> {verdict.candidate:.3f}"
            try:
                published = self._publish(update, reason, verdict.candidate)
            except PolydraftError as error:
                update.domain.learner = None
                self._reject(update.name, str(error), numbers)
                return
            update.domain.learner_version = published.number
            self.counts["published"] += 1
            numbers["version"] = published.number
            self._tell("publish", update.name, reason, numbers)
            self._changed(update.name)

    def _publish(self, update: Update, reason: str, score: float) -> Version:
        """Publish the candidate; what was served before anything was published becomes version 0 first."""
        if self.registry.current(update.name) is None:
            self.registry.publish(update.name, update.served, reason="what the domain was born with")
        return self.registry.publish(
            update.name, update.candidate, reason=reason, score=score, parent=update.version
        )

    def _reject(self, name: str, reason: str, numbers: dict[str, float]) -> None:
        """Count and report an update or a record that was refused."""
        self.counts["rejected"] += 1
        self._tell("update_rejected", name, reason, dict(numbers))

    def _due(self) -> str | None:
        """The domain due for an update with most traffic times headroom."""
        gains = {
            name: domain.gain
            for name, domain in self.domains.items()
            if self._has(name)
            and domain.is_due(
                self.of(name).update_every, self.of(name).guard.min_positions, self._read_by(name)
            )
        }
        return max(gains, key=lambda name: gains[name]) if gains else None

    def head_of(self, key: str) -> TrainableHead:
        """The draft that an expert belongs to."""
        return self.heads[split_key(key)[1]]

    def map_of(self, key: str) -> torch.Tensor:
        """Draft indices by target id, of the draft that an expert belongs to."""
        return self._to_draft[split_key(key)[1]]

    def _has(self, key: str) -> bool:
        domain, kind = split_key(key)
        return kind in self.heads and self.heads[kind].has(domain)

    def _tell(self, what: str, key: str, reason: str, numbers: dict[str, float]) -> None:
        """Report an event under the expert's domain."""
        domain, kind = split_key(key)
        self.on_event(Event(what, domain, reason if len(self.heads) == 1 else f"{kind}: {reason}", numbers))

    def _served(self, name: str) -> tuple[Expert, int]:
        """The served expert of a domain and its version number."""
        version = self.registry.current(name)
        if version is None or not version.tensors:
            return self.head_of(name).served(split_key(name)[0]), 0
        device = self.map_of(name).device
        return {n: t.to(device) for n, t in version.tensors.items()}, version.number


def _wins(rival: Verdict | None, candidate: Verdict) -> bool:
    """Whether a rival may be served and gains more than the candidate."""
    if rival is None or not rival.accepted:
        return False
    return not candidate.accepted or rival.overlap_gain > candidate.overlap_gain
