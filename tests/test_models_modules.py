"""Models in real modules: postponed annotations, forward references, and classes split over two files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from sqlalchemy import Engine, create_engine

from tests.support_models import drive

Write = Callable[..., list[ModuleType]]


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules of a user's and imports them in the order given."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(**sources: str) -> list[ModuleType]:
        for name, source in sources.items():
            names.append(name)
            (tmp_path / f"{name}.py").write_text(dedent(source))
        importlib.invalidate_caches()
        return [importlib.import_module(name) for name in sources]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_with_postponed_annotations_that_imports_only_what_it_names(bare: Engine, modules: Write) -> None:
    (module,) = modules(
        users_models="""
        from __future__ import annotations

        from uuid import UUID, uuid4
        from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
        from sqla_durable import ReceiptMixin, RunMixin
        from tests.support_models import JobStatus, jobs, lifecycle

        class Base(DeclarativeBase):
            pass

        class Job(RunMixin, Base):
            __tablename__ = "job"
            __lifecycle__ = lifecycle()
            id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
            status: Mapped[JobStatus] = jobs.column()

        class JobStep(ReceiptMixin[Job], Base):
            __tablename__ = "job_step"
        """
    )
    drive(bare, module.Job, module.JobStep)


@pytest.mark.parametrize("base", ["DeclarativeBase", "MappedAsDataclass, DeclarativeBase"])
def test_models_split_over_two_modules_that_know_each_other_to_type_checkers_only(
    bare: Engine, modules: Write, base: str
) -> None:
    _, jobs, customers = modules(
        users_base=f"""
        from sqlalchemy.orm import DeclarativeBase, MappedAsDataclass

        class Base({base}):
            pass
        """,
        users_jobs="""
        from __future__ import annotations

        from typing import TYPE_CHECKING
        from uuid import UUID, uuid4
        from sqlalchemy import ForeignKey
        from sqlalchemy.orm import Mapped, mapped_column, relationship
        from sqla_durable import ReceiptMixin, RunMixin
        from tests.support_models import JobStatus, jobs, lifecycle
        from users_base import Base

        if TYPE_CHECKING:
            from users_customers import Customer

        class Job(RunMixin, Base):
            __tablename__ = "job"
            __lifecycle__ = lifecycle()
            id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4)
            status: Mapped[JobStatus] = jobs.column()
            customer_id: Mapped[int | None] = mapped_column(ForeignKey("customer.id"), default=None)
            customer: Mapped[Customer | None] = relationship(back_populates="jobs", default=None, lazy="joined")
            steps: Mapped[list[JobStep]] = relationship(default_factory=list, viewonly=True, lazy="selectin")

        class JobStep(ReceiptMixin[Job], Base):
            __tablename__ = "job_step"
        """.replace("default_factory=uuid4", "default_factory=uuid4" if "Dataclass" in base else "default=uuid4")
        .replace(", default=None)", ", default=None)" if "Dataclass" in base else ")")
        .replace("default=None, lazy", "default=None, lazy" if "Dataclass" in base else "lazy")
        .replace("default_factory=list, ", "default_factory=list, " if "Dataclass" in base else ""),
        users_customers="""
        from __future__ import annotations

        from typing import TYPE_CHECKING
        from sqlalchemy.orm import Mapped, mapped_column, relationship
        from users_base import Base

        if TYPE_CHECKING:
            from users_jobs import Job

        class Customer(Base):
            __tablename__ = "customer"
            id: Mapped[int] = mapped_column(primary_key=True)
            jobs: Mapped[list[Job]] = relationship(back_populates="customer")
        """,
    )
    assert customers.Customer
    drive(bare, jobs.Job, jobs.JobStep)


def test_receipts_in_another_module_than_their_run(bare: Engine, modules: Write) -> None:
    jobs, steps = modules(
        users_jobs="""
        from __future__ import annotations

        from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
        from sqla_durable import RunMixin
        from tests.support_models import JobStatus, jobs, lifecycle

        class Base(DeclarativeBase):
            pass

        class Job(RunMixin, Base):
            __tablename__ = "job"
            __lifecycle__ = lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = jobs.column()
            steps: Mapped[list["JobStep"]] = relationship(viewonly=True)
        """,
        users_steps="""
        from __future__ import annotations

        from sqla_durable import ReceiptMixin
        from users_jobs import Base, Job

        class JobStep(ReceiptMixin[Job], Base):
            __tablename__ = "job_step"
        """,
    )
    drive(bare, jobs.Job, steps.JobStep)
