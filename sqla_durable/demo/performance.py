"""One demo from the plan file to the verdict."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from uuid import UUID

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from sqla_durable.demo.check import check
from sqla_durable.demo.exc import DemoError
from sqla_durable.demo.kills import Killer, instants
from sqla_durable.demo.models import Account, Plan, PlanStatus, Stock, plan_statuses
from sqla_durable.demo.place import own_database
from sqla_durable.demo.plan import PlanFile, read_plan
from sqla_durable.demo.process import Process, printer_in
from sqla_durable.demo.show import Show, make_console
from sqla_durable.demo.tables import create_tables
from sqla_durable.demo.watch import Watch


def perform(file: Path | None, kills: int, seed: int) -> bool:
    """Carry a plan out, killing on the way, and check what has come of it.

    :param file: the plan; None for the one that comes with the demo.
    :param kills: how often to kill.
    :param seed: chooses when to kill.
    :return: whether the plan was executed and every effect is there as often as it must be.
    :raises DemoError: where the plan file is no good, there is no PostgreSQL to be had, or a process failed.
    """
    plan = read_plan(file)
    show = Show(make_console(), plan.actions)
    with TemporaryDirectory(prefix="sqla_durable_demo_") as name, own_database(show.say) as url:
        folder = Path(name)
        engine = create_engine(url)
        try:
            create_tables(url, folder)
            ident = approved(engine, plan)
            show.approved(plan, kills, seed)
            watch = Watch(engine, ident)
            killer = Killer(watch, plan.actions, lambda number: Process(url, ident, folder, number), show)
            with show.live():
                killed = killer.run(instants(kills, len(plan.actions), Random(seed)))  # noqa: S311
            sight = watch.look()
            with Session(engine) as session:
                tallies = check(session, ident, plan, _printed(folder))
        finally:
            engine.dispose()
        show.receipts(sight)
        show.verdict(sight, killed, tallies)
    return sight.status is PlanStatus.EXECUTED and not any(tally.faults for tally in tallies)


def approved(engine: Engine, plan: PlanFile) -> UUID:
    """Fill the tables, and approve the plan: a conditional transition, won or lost."""
    with Session(engine) as session, session.begin():
        session.add_all(
            Stock(article=article, site=site, quantity=pieces)
            for (article, site), pieces in plan.opening_stock().items()
        )
        session.add_all(Account(name=name, balance=balance) for (name,), balance in plan.opening_balances().items())
        row = Plan(actions=[action.model_dump(mode="json") for action in plan.actions])
        session.add(row)
        session.flush()
        if not plan_statuses.transition(session, row, PlanStatus.APPROVED):
            raise DemoError(f"the plan could not be approved: it is {row.status.value}.")
        return row.id


def _printed(folder: Path) -> list[str]:
    printer = printer_in(folder)
    return printer.read_text().splitlines() if printer.exists() else []
