"""A check finds what in a server, or on the way to it, takes guarantees or speed away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, text

from sqla_durable import Severity, check
from sqla_durable.checkup import server, vacuum
from tests.support import eventually
from tests.support_check import Base, execute, found, one, own, own_server
from tests.support_pooler import Pooler

__all__ = ["own", "own_server"]  # fixtures

SETTINGS: dict[str, tuple[str, str]] = {
    "synchronous_commit=off": ("error", "synchronous-commit"),
    "session_replication_role=replica": ("error", "replication-role"),
    "statement_timeout=500": ("warning", "short-timeout"),
    "lock_timeout=500": ("warning", "short-timeout"),
    "idle_session_timeout=30s": ("warning", "short-timeout"),
    "idle_in_transaction_session_timeout=20s": ("warning", "short-timeout"),
    "default_transaction_read_only=on": ("error", "read-only"),
}


@contextmanager
def configured(engine: Engine, **settings: str) -> Iterator[None]:
    """Settings of the whole server, until they are reset."""

    def reload() -> None:
        with engine.connect() as connection:
            before = connection.scalar(text("SELECT pg_conf_load_time()"))
        execute(engine, "SELECT pg_reload_conf()")

        def loaded() -> bool:
            with engine.connect() as connection:
                return bool(connection.scalar(text("SELECT pg_conf_load_time()")) != before)

        eventually(loaded, "the settings")
        engine.dispose()

    try:
        execute(engine, *(f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items()))
        reload()
        yield
    finally:
        execute(engine, *(f"ALTER SYSTEM RESET {name}" for name in settings))
        reload()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_found(own: Engine, setting: str) -> None:
    name = setting.partition("=")[0]
    engine = create_engine(own.url, connect_args={"options": f"-c {setting}"})
    finding = one(engine)
    assert (finding.severity.value, finding.code) == SETTINGS[setting]
    assert name in f"{finding.subject} {finding.remedy}"
    engine.dispose()


def test_a_setting_of_the_server_is_found(own: Engine) -> None:
    with configured(own, fsync="off", full_page_writes="off", autovacuum="off", track_counts="off"):
        assert found(own) == [
            ("warning", "fsync", "fsync = off"),
            ("warning", "full-page-writes", "full_page_writes = off"),
            ("warning", "autovacuum-off", "autovacuum = off"),
            ("warning", "autovacuum-off", "track_counts = off"),
        ]
    assert found(own) == []


def test_a_server_that_is_too_old_is_found(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OLDEST_SERVER", (99,))
    execute(own, "DROP TABLE ticket")
    finding = one(own)
    assert (finding.severity, finding.code) == (Severity.ERROR, "old-server")
    assert "99" in finding.meaning


@pytest.mark.parametrize("apart", [-3600, 3600])
def test_a_clock_that_is_far_off_is_found(own: Engine, monkeypatch: pytest.MonkeyPatch, apart: int) -> None:
    now = server.time.time
    monkeypatch.setattr(server.time, "time", lambda: now() + apart)
    finding = one(own)
    assert (finding.severity, finding.code) == (Severity.WARNING, "clock")
    assert f"1:00:00 {'behind' if apart > 0 else 'ahead of'} that of this machine" in finding.meaning


# a pooler


@pytest.fixture
def pooler(own: Engine) -> Iterator[Pooler]:
    pooler = Pooler(own.url)
    yield pooler
    pooler.close()


def test_a_pooler_in_transaction_mode_is_found(own: Engine, pooler: Pooler) -> None:
    engine = create_engine(pooler.url, connect_args={"prepare_threshold": None})
    finding = one(engine)
    assert (finding.severity, finding.code) == (Severity.WARNING, "pooler")
    assert "several backends" in finding.meaning
    assert "listen=False" in finding.remedy
    engine.dispose()


def test_a_pooler_is_told_from_a_connections_only_transaction(own: Engine, pooler: Pooler) -> None:
    engine = create_engine(pooler.url, connect_args={"prepare_threshold": None})
    with engine.connect() as connection, connection.begin():
        (finding,) = check(connection, Base)
    assert finding.code == "pooler"
    assert "cannot be told" in finding.meaning
    engine.dispose()


# vacuum


def test_a_table_that_is_not_vacuumed_is_found(own: Engine) -> None:
    execute(own, "ALTER TABLE job_step_default SET (autovacuum_enabled = false)")
    execute(own, 'ALTER TABLE "order" SET (autovacuum_enabled = off)')
    assert found(own) == [
        ("warning", "autovacuum-off", '"order"'),
        ("warning", "autovacuum-off", "job_step_default"),
    ]


def test_dead_rows_that_autovacuum_leaves_are_found(own: Engine) -> None:
    with configured(own, autovacuum_naptime="1h"):
        execute(
            own,
            "INSERT INTO ticket SELECT gen_random_uuid() FROM generate_series(1, 3000)",
            "ANALYZE ticket",
            "UPDATE ticket SET status = 'approved'",
        )
        finding = eventually(lambda: next(iter(check(own, Base)), None), "the statistics")
        assert (finding.severity, finding.code, finding.subject) == (Severity.WARNING, "autovacuum-behind", "ticket")
        assert "3000 dead rows, where autovacuum begins at 650" in finding.meaning
        execute(own, "VACUUM ticket")
        eventually(lambda: not check(own, Base), "the statistics")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long takes no time."""
    monkeypatch.setattr(vacuum, "_IDLE", timedelta(0))
    monkeypatch.setattr(vacuum, "_LONG", timedelta(0))


def test_transactions_that_hold_vacuum_back_are_found(own: Engine, at_once: None) -> None:
    assert found(own) == []
    other = create_engine(own.url, connect_args={"application_name": "a report"})
    with other.connect() as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        assert found(own) == [("warning", "long-transaction", f"backend {pid} (a report)")]
        assert "is idle in a transaction" in one(own).meaning
    assert found(own) == []
    other.dispose()


def test_a_transaction_is_not_found_before_its_time(own: Engine) -> None:
    with own.connect() as connection:
        connection.execute(text("SELECT txid_current()"))
        assert found(own) == []


def test_a_prepared_transaction_is_found(own: Engine, at_once: None) -> None:
    with own.connect() as connection:
        connection.execute(text("INSERT INTO customer (name) VALUES ('ada')"))
        connection.execute(text("PREPARE TRANSACTION 'forgotten'"))
    finding = one(own)
    assert (finding.severity, finding.code) == (Severity.WARNING, "prepared-transaction")
    execute(own, finding.remedy.partition(",")[0])
    assert found(own) == []


def test_a_replication_slot_that_nobody_reads_is_found(own: Engine) -> None:
    execute(own, "SELECT pg_create_logical_replication_slot('left', 'pgoutput')")
    finding = one(own)
    assert (finding.severity, finding.code, finding.subject) == (Severity.WARNING, "replication-slot", "left")
    execute(own, finding.remedy.partition(",")[0])
    assert found(own) == []
