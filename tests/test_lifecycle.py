"""What claiming, finishing and dying mean for a model: each role is checked when it is declared."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import ConfigurationError, Lifecycle, RunMixin, StatusMachine

DEFAULT: Any = object()


class S(StrEnum):
    DRAFT = "draft"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    LATE = "late"


class Other(StrEnum):
    READY = "ready"


FULL = {S.DONE, S.FAILED, S.DEAD, S.CANCELLED, S.LATE, S.READY}


def lifecycle(leaving: set[S] = FULL, more: dict[S, set[S]] | None = None, **options: Any) -> Lifecycle[S]:
    """A lifecycle whose running status has the edges ``leaving``; every status can be reached from a draft."""
    machine = StatusMachine(
        S,
        initial=S.DRAFT,
        transitions={
            S.DRAFT: {S.READY, S.DONE, S.FAILED, S.DEAD, S.CANCELLED, S.LATE},
            S.READY: {S.RUNNING},
            S.RUNNING: leaving,
            **(more or {}),
        },
    )
    roles = {"ready": S.READY, "running": S.RUNNING, "done": S.DONE, "failed": S.FAILED}
    return Lifecycle(machine, **{**roles, **options})


@pytest.mark.parametrize(
    ("missing", "options", "edge"),
    [
        (S.DONE, {}, "running -> done"),
        (S.FAILED, {}, "running -> failed"),
        (S.READY, {}, "running -> lapsed"),
        (S.DEAD, {"dead": S.DEAD}, "running -> dead"),
        (S.CANCELLED, {"cancelled": S.CANCELLED}, "running -> cancelled"),
        (S.LATE, {"timed_out": S.LATE}, "running -> timed_out"),
        (S.DEAD, {"lapsed": S.DEAD}, "running -> lapsed"),
    ],
)
def test_an_edge_that_the_library_takes_must_be_declared(missing: S, options: dict[str, Any], edge: str) -> None:
    lifecycle(**options)
    with pytest.raises(ConfigurationError) as caught:
        lifecycle(FULL - {missing}, **options)
    assert f"Lifecycle takes the edge {edge}" in str(caught.value)
    assert f"running -> {missing.value}; add it to transitions=." in str(caught.value)


def test_the_edge_from_ready_to_running_must_be_declared() -> None:
    with pytest.raises(ConfigurationError, match=r"the edge ready -> running, .* declare draft -> running"):
        lifecycle(ready=S.DRAFT)


@pytest.mark.parametrize(
    "role", ["ready", "running", "done", "failed", "dead", "cancelled", "timed_out", "lapsed", "requeue"]
)
def test_a_role_takes_no_status_of_another_enumeration(role: str) -> None:
    stranger: Any = {Other.READY} if role == "requeue" else Other.READY
    with pytest.raises(ConfigurationError, match="ready"):
        lifecycle(**{role: stranger})


@pytest.mark.parametrize("role", ["done", "failed", "dead", "cancelled", "timed_out"])
def test_a_run_lands_only_where_no_edge_leaves(role: str) -> None:
    status = S.LATE if role == "timed_out" else S(role)
    with pytest.raises(ConfigurationError) as caught:
        lifecycle(more={status: {S.READY}}, **{role: status})
    assert f"Lifecycle({role}={status.value}): a run lands in a terminal status" in str(caught.value)
    assert "requeue=" in str(caught.value)


def test_requeue_names_terminal_statuses_only() -> None:
    lifecycle(requeue={S.FAILED, S.DEAD})
    with pytest.raises(ConfigurationError, match=r"requeue=\): ready is not terminal; use its edges"):
        lifecycle(requeue={S.READY, S.FAILED})


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=-1), timedelta(milliseconds=9)], ids=str)
def test_a_lease_that_cannot_be_kept_is_refused(lease: timedelta) -> None:
    with pytest.raises(ConfigurationError, match=r"Lifecycle\(lease=.*from 10 milliseconds"):
        lifecycle(lease=lease)


def test_a_lease_that_would_end_after_the_calendar_of_postgresql_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Lifecycle\(lease="):
        lifecycle(lease=timedelta.max)


def test_heartbeats_come_every_third_of_the_lease_and_cannot_be_set_otherwise() -> None:
    assert lifecycle(lease=timedelta(seconds=30)).heartbeat == timedelta(seconds=10)
    with pytest.raises(TypeError):
        lifecycle(lease=timedelta(seconds=10), heartbeat=timedelta(seconds=30))


@pytest.mark.parametrize(
    "limit", [timedelta(0), timedelta(microseconds=999), timedelta(seconds=-1), timedelta(days=25)], ids=str
)
def test_a_step_timeout_beyond_what_postgresql_takes_is_refused(limit: timedelta) -> None:
    with pytest.raises(ConfigurationError, match=r"from 1 millisecond to PostgreSQL's limit of 24 days.* or None"):
        lifecycle(step_timeout=limit)


def test_the_step_timeout_is_the_lease_unless_said_otherwise() -> None:
    assert lifecycle(lease=timedelta(seconds=7)).idle_limit == timedelta(seconds=7)
    assert lifecycle(lease=timedelta(days=400)).idle_limit == timedelta(milliseconds=2**31 - 1)
    assert lifecycle(step_timeout=timedelta(seconds=1)).idle_limit == timedelta(seconds=1)
    assert lifecycle(step_timeout=None).idle_limit is None


def test_a_run_without_attempts_left_is_dead_where_that_is_named_and_failed_where_not() -> None:
    assert lifecycle().spent is S.FAILED
    assert lifecycle(dead=S.DEAD).spent is S.DEAD


def test_a_lapsed_run_is_ready_again_unless_said_otherwise() -> None:
    assert lifecycle().lapses_to is S.READY
    assert lifecycle(FULL - {S.READY}, lapsed=S.FAILED).lapses_to is S.FAILED


def test_without_the_edge_back_to_ready_there_is_no_release() -> None:
    assert lifecycle().releases
    assert not lifecycle(FULL - {S.READY}, lapsed=S.FAILED).releases


def test_a_run_class_needs_a_lifecycle() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Bare is a run and needs __lifecycle__ = Lifecycle\(...\)"):

        class Bare(RunMixin, Base):
            __tablename__ = "bare"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_run_class_needs_a_status_column_of_its_own_machine() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Bare has 0 columns made by .*\.column\(\); it needs one"):

        class Bare(RunMixin, Base):
            __tablename__ = "bare"
            __lifecycle__ = lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[S]
