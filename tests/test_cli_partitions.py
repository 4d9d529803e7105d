"""The command line on monthly partitions: listed, created, dropped, and written as SQL."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.support_cli import FORMS, answered, call, importable, lines, made, refused
from tests.test_partitions import months_ago
from tests.test_partitions_runs import Job, JobStep, a_month, monthly, ready

__all__ = ["monthly"]  # a fixture


@pytest.fixture(params=FORMS)
def target(request: pytest.FixtureRequest, monthly: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    return importable(monkeypatch, jobs=made(request.param, monthly, Job, JobStep)) + ":jobs"


def named(month: Any) -> list[str]:
    return [f"monthly_job_{month:%Y_%m}", f"monthly_job_step_{month:%Y_%m}"]


def test_partitions_are_created_ahead_and_dropped_by_age(target: str, monthly: Engine) -> None:
    new, old, live = months_ago(-4), months_ago(5), months_ago(6)
    listed = [each["name"] for each in lines("partitions", target)]
    assert not {*named(new)} & {*listed}
    assert {*named(new)} <= {each["name"] for each in lines("partitions", target, "--ahead", 4)}
    a_month(monthly, old)
    assert not {*named(old)} & {each["name"] for each in lines("partitions", target, "--drop-older-than", "30d")}
    a_month(monthly, live)
    ready(monthly, live)
    done = call("partitions", target, "--drop-older-than", "30d")
    assert done.exit_code == 1
    assert "1 live, 0 could be requeued" in done.stdout


def test_a_month_that_could_have_none_is_told_of(target: str, monthly: Engine) -> None:
    month = months_ago(-4)
    ready(monthly, month)
    done = call("partitions", target, "--ahead", 4)
    assert done.exit_code == 1
    assert f"runs of {month:%Y-%m} are in the default partition" in done.stderr


def test_the_sql_of_a_month_can_be_executed(target: str, monthly: Engine) -> None:
    month = months_ago(12)
    written = answered("partitions", target, "--sql", f"{month:%Y-%m}")
    with monthly.begin() as connection:
        connection.execute(text(written))
    assert {*named(month)} <= {each["name"] for each in lines("partitions", target)}
    assert "is not a month" in refused("partitions", target, "--sql", "spring")[1]


def test_what_is_not_partitioned_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    target = importable(monkeypatch, plans=made("sync", engine)) + ":plans"
    assert "neither Plan nor its receipts are partitioned" in refused("partitions", target)[1]
