"""What claiming, finishing and dying mean for one model, in the words of its own status machine."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Final, Generic, Literal, cast

from sqla_durable.exc import ConfigurationError
from sqla_durable.machine import StatusT
from sqla_durable.retry import LONGEST, Retry, require_durations
from sqla_durable.status import StatusMachine

_LONGEST_TIMEOUT: Final = timedelta(milliseconds=2**31 - 1)
_SHORTEST: Final = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Lifecycle(Generic[StatusT]):
    """The roles that a machine's statuses play for a run, and how long its holder is presumed alive.

    :param machine: the status machine of the model's status column.
    :param ready: the status a run is claimed from.
    :param running: the status of a claimed run.
    :param done: where a run lands whose work is finished.
    :param failed: where a run lands whose work cannot be finished.
    :param dead: where a run lands that has used up its attempts; ``failed`` where not named.
    :param cancelled: where a run lands that someone asked to cancel; without it a run cannot be cancelled.
    :param timed_out: where a run lands that ran past its deadline.
    :param expired: what becomes of a run whose ``expires_at`` has passed, the column of :class:`.ExpiryMixin`; the
     statuses that can expire are those with an edge to this one.
    :param frozen: the attributes, of the root table, that only a draft may change: a run in a status that leads to
     ``ready`` and cannot be come back to from there.
    :param lapsed: what becomes of a run whose holder died: ``ready``, the default, or another status.
    :param lease: for how long a holder is presumed alive after its last sign of life. Heartbeats come every third.
    :param retry: how often a run may be started, and how long it waits in between.
    :param requeue: the terminal statuses that :meth:`.Runs.requeue` takes a run back from.
    :param step_timeout: for how long a transactional step may leave its connection idle before PostgreSQL ends it
     (`idle_in_transaction_session_timeout
     <https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-IN-TRANSACTION-SESSION-TIMEOUT>`_);
     by default the lease, and None removes it. Time spent inside SQL does not count.
    :param one_in_flight: the attributes that form a group, such as ``("kind",)``: of each group at most one run is in
     a status that is not terminal. A run in which one of them is null is in no group.
    :param notify: whether workers that listen are told of a run that has become ready (`NOTIFY
     <https://www.postgresql.org/docs/current/sql-notify.html>`_).
    :param guard: whether triggers keep the run's table and that of its receipts to the rules, whoever writes to them;
     the same as ``__guard__ = True`` in the class.
    :raises ConfigurationError: where an edge that the library will take is not declared, a status has a role it cannot
     play, or a duration is out of range.
    """

    machine: StatusMachine[StatusT]
    _: KW_ONLY
    ready: StatusT
    running: StatusT
    done: StatusT
    failed: StatusT
    dead: StatusT | None = None
    cancelled: StatusT | None = None
    timed_out: StatusT | None = None
    expired: StatusT | None = None
    frozen: Collection[str] = ()
    lapsed: StatusT | None = None
    lease: timedelta = timedelta(seconds=120)
    retry: Retry = field(default_factory=Retry)
    requeue: AbstractSet[StatusT] = frozenset()
    step_timeout: timedelta | Literal["lease"] | None = "lease"
    one_in_flight: tuple[str, ...] | None = None
    notify: bool = True
    guard: bool = False

    def __post_init__(self) -> None:
        self._check_durations()
        self._check_group()
        self._check_edges()
        self._check_expiry()
        for role in ("done", "failed", "dead", "cancelled", "timed_out", "expired"):
            status: StatusT | None = getattr(self, role)
            if status is not None and status not in self.machine.terminal:
                raise ConfigurationError(
                    f"Lifecycle({role}={status.value}): a run lands in a terminal status, but edges leave this one; "
                    "remove them, and name the status in requeue= if operators may take such a run back."
                )
        if living := sorted(status.value for status in self.requeue if status not in self.machine.terminal):
            raise ConfigurationError(f"Lifecycle(requeue=): {', '.join(living)} is not terminal; use its edges.")
        if isinstance(self.frozen, str):
            raise ConfigurationError(f"Lifecycle(frozen={self.frozen!r}): pass a tuple of names, ({self.frozen!r},).")

    @property
    def lapses_to(self) -> StatusT:
        """What becomes of a run whose holder died, while attempts are left."""
        return self.ready if self.lapsed is None else self.lapsed

    @property
    def spent(self) -> StatusT:
        """Where a run lands that has used up its attempts."""
        return self.failed if self.dead is None else self.dead

    @property
    def expirable(self) -> frozenset[StatusT]:
        """The statuses from which a run can expire."""
        return frozenset() if self.expired is None else self.machine.sources(self.expired)

    @property
    def drafts(self) -> frozenset[StatusT]:
        """The statuses in which the frozen attributes may still change."""
        settled = self.machine.reachable(self.ready)
        return frozenset(
            s for s in self.machine.statuses if s not in settled and self.ready in self.machine.reachable(s)
        )

    @property
    def releases(self) -> bool:
        """Whether a holder can hand its run back; without the edge an interrupted run is left to its lease."""
        return self.ready in self.machine.transitions[self.running]

    @property
    def heartbeat(self) -> timedelta:
        """How often the lease of a run under way is renewed."""
        return self.lease / 3

    @property
    def idle_limit(self) -> timedelta | None:
        """For how long a step's transaction may be idle."""
        return min(self.lease, _LONGEST_TIMEOUT) if self.step_timeout == "lease" else self.step_timeout

    def _check_durations(self) -> None:
        require_durations(self, lease=self.lease)
        if self.step_timeout not in {"lease", None}:
            require_durations(self, step_timeout=self.step_timeout)
        if not timedelta(milliseconds=10) <= self.lease <= LONGEST:
            raise ConfigurationError(
                f"Lifecycle(lease={self.lease}): a lease lasts from 10 milliseconds to {LONGEST.days} days."
            )
        if isinstance(self.step_timeout, timedelta) and not _SHORTEST <= self.step_timeout <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"Lifecycle(step_timeout={self.step_timeout}): from 1 millisecond to PostgreSQL's limit of "
                f"{_LONGEST_TIMEOUT}, or None for no limit."
            )

    def _check_group(self) -> None:
        names = self.one_in_flight
        if names is None:
            return
        if not isinstance(cast(object, names), tuple) or not all(isinstance(cast(object, name), str) for name in names):
            raise ConfigurationError(
                f'Lifecycle(one_in_flight={names!r}): give a tuple of attribute names, as in one_in_flight=("kind",).'
            )
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(
                f"Lifecycle(one_in_flight={names!r}): name at least one attribute, and each only once. For one run at "
                "a time of the whole class, name an attribute that is the same in all of them."
            )

    def _check_expiry(self) -> None:
        if self.expired is None:
            return
        if not isinstance(self.expired, self.machine.statuses):
            raise ConfigurationError(f"Lifecycle: {self.expired!r} is not a status of {self.machine!r}.")
        if not self.expirable:
            raise ConfigurationError(
                f"Lifecycle(expired={self.expired.value}): no edge of {self.machine!r} leads there; declare one from "
                "each status that can expire."
            )
        if self.running in self.expirable:
            raise ConfigurationError(
                f"Lifecycle(expired={self.expired.value}): {self.running.value} -> {self.expired.value} is declared, "
                "but a run under way does not expire; remove that edge."
            )

    def _check_edges(self) -> None:
        wanted = {
            "ready -> running": (self.ready, self.running),
            "running -> done": (self.running, self.done),
            "running -> failed": (self.running, self.failed),
            "running -> lapsed": (self.running, self.lapses_to),
            "running -> dead": (self.running, self.dead),
            "running -> cancelled": (self.running, self.cancelled),
            "running -> timed_out": (self.running, self.timed_out),
        }
        for name, (from_, to) in wanted.items():
            if to is None:
                continue
            for status in (from_, to):
                if not isinstance(status, self.machine.statuses):
                    raise ConfigurationError(f"Lifecycle: {status!r} is not a status of {self.machine!r}.")
            if to not in self.machine.transitions[from_]:
                raise ConfigurationError(
                    f"Lifecycle takes the edge {name}, but {self.machine!r} does not declare "
                    f"{from_.value} -> {to.value}; add it to transitions=."
                )
