"""Executing an approved plan: each action is a step, whose key is its position in the frozen list."""

from __future__ import annotations

from decimal import Decimal

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from sqla_durable.asyncio import AsyncRun

from .actions import MoveStock, Transfer, WriteNote
from .models import Account, Note, Plan, Stock


class ActionRefused(Exception):
    """An action cannot be done as things are; the plan ends here, and what was done before it stays."""


async def execute_plan(run: AsyncRun[Plan]) -> None:
    """Do what the plan says, in its order. This is the handler, of requests and of workers."""
    for position, action in enumerate(run.row.actions):
        match action:
            case MoveStock():
                await run.step(position, move_stock, action)
            case WriteNote():
                await run.step(position, write_note, action)
            case Transfer():
                await run.step(position, transfer, action)


async def move_stock(session: AsyncSession, move: MoveStock) -> int:
    """Move pieces from one site to another; return how many are left at the source."""
    of_article = update(Stock).where(Stock.article == move.article)
    taken = of_article.where(Stock.site == move.source, Stock.quantity >= move.quantity)
    left: int | None = await session.scalar(
        taken.values(quantity=Stock.quantity - move.quantity).returning(Stock.quantity)
    )
    if left is None:
        raise ActionRefused(f"{move.source} does not have {move.quantity} of {move.article}")
    put = of_article.where(Stock.site == move.target).values(quantity=Stock.quantity + move.quantity)
    if await session.scalar(put.returning(Stock.site)) is None:
        raise ActionRefused(f"{move.target} does not keep {move.article}")
    return left


async def write_note(session: AsyncSession, note: WriteNote) -> int:
    """Write a note; return its number."""
    written = Note(text=note.text)
    session.add(written)
    await session.flush()
    return written.id


async def transfer(session: AsyncSession, order: Transfer) -> Decimal:
    """Move money from one account to another; return what the payer has left."""
    taken = update(Account).where(Account.name == order.payer, Account.balance >= order.amount)
    left: Decimal | None = await session.scalar(
        taken.values(balance=Account.balance - order.amount).returning(Account.balance)
    )
    if left is None:
        raise ActionRefused(f"{order.payer} does not have {order.amount}")
    put = update(Account).where(Account.name == order.payee).values(balance=Account.balance + order.amount)
    if await session.scalar(put.returning(Account.name)) is None:
        raise ActionRefused(f"{order.payee} has no account")
    return left
