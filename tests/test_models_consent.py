"""Expiry and frozen payloads on whatever the user's model looks like."""

# ruff: noqa: RUF012 - mapper and table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import (
    DateTime,
    Engine,
    ForeignKey,
    MetaData,
    create_engine,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, ExpiryMixin, FrozenPayload, ReceiptMixin, RunMixin, Runs
from sqla_durable.testing import expire
from tests.support_consent import HOUR, Status, consent_lifecycle, consent_statuses

Classes = tuple[Any, Any, Callable[..., Any]]
LIFECYCLE = {"frozen": ("actions",)}


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


def plain(metadata: MetaData | None = None, table: str = "consent", **arguments: Any) -> Classes:
    class Base(DeclarativeBase):
        pass

    if metadata is not None:
        Base.metadata = metadata

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = table
        __table_args__ = arguments
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = f"{table}_step"
        __table_args__ = arguments

    return Consent, ConsentStep, Consent


def renamed() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Consent(ExpiryMixin, RunMixin, Base):
        __tablename__ = "The %s Consents"
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column("the key", primary_key=True)
        status: Mapped[Status] = consent_statuses.column("run state")
        actions: Mapped[list[str]] = mapped_column("until", JSONB)
        expires_at: Mapped[datetime | None] = mapped_column("valid until (%)", DateTime(timezone=True))
        finished_at: Mapped[datetime | None] = mapped_column("ended", DateTime(timezone=True))
        touched: Mapped[str | None] = mapped_column(onupdate="changed")

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "step"

    return Consent, ConsentStep, Consent


def dataclass_base() -> Classes:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        actions: Mapped[list[str]] = mapped_column(JSONB)
        status: Mapped[Status] = consent_statuses.column()

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    return Consent, ConsentStep, Consent


def abstract_base() -> Classes:
    class Base(DeclarativeBase):
        pass

    class AnyConsent(RunMixin, ExpiryMixin, Base):
        __abstract__ = True
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True)
        actions: Mapped[list[str]] = mapped_column(JSONB)

    class Consent(AnyConsent):
        __tablename__ = "consent"
        status: Mapped[Status] = consent_statuses.column()

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    return Consent, ConsentStep, Consent


def composite() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        tenant: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    numbers = iter(range(1, 100))
    return Consent, ConsentStep, lambda **values: Consent(tenant="t", number=next(numbers), **values)


def single_table() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any"}
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)

    class Child(Consent):
        __mapper_args__ = {"polymorphic_identity": "child"}

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    return Child, ConsentStep, Child


def joined() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any"}
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)

    class Child(Consent):
        __tablename__ = "child"
        __mapper_args__ = {"polymorphic_identity": "child"}
        id: Mapped[int] = mapped_column(ForeignKey(Consent.id), primary_key=True)
        own: Mapped[str | None]

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    return Child, ConsentStep, Child


MODELS = [plain, renamed, dataclass_base, abstract_base, composite, single_table, joined]


class Drive:
    """Takes a model through everything that expiry and freezing can do."""

    def __init__(self, engine: Engine, classes: Classes) -> None:
        self.entity, step, self._new = classes
        self.engine = engine
        self.factory = sessionmaker(engine)
        self.runs: Runs[Any] = Runs(self.factory, self.entity, step)

    def add(self, status: Status) -> Any:
        with self.factory.begin() as session:
            row = self._new(status=status, actions=["a"])
            row.expires_at = func.now() + HOUR
            session.add(row)
            session.flush()
            key = tuple(inspect(row).identity)
        return key[0] if len(key) == 1 else key

    def move(self, ident: Any, to: Status, **options: Any) -> bool:
        with self.factory.begin() as session:
            return consent_statuses.transition(session, (self.entity, ident), to, **options)

    def expire(self, ident: Any) -> None:
        with self.factory.begin() as session:
            expire(session, self.entity, ident)

    def get(self, ident: Any) -> Any:
        with Session(self.engine) as session:
            return session.get_one(self.entity, ident)

    def everything(self) -> None:
        self.expiry()
        self.payload()

    def expiry(self) -> None:
        approved, late, swept, healed = (self.add(Status.PENDING) for _ in range(4))
        values = {"actions": ["approved"], "expires_at": func.now() + 2 * HOUR}
        assert self.move(approved, Status.APPROVED, values=values)
        for ident in (late, swept, healed):
            self.expire(ident)
        assert not self.move(late, Status.APPROVED)
        assert self.runs.heal(healed)
        assert self.runs.reap() == 2
        (run,) = self.runs.claim_due(10)
        assert run.row.actions == ["approved"]
        run.finish()
        for ident in (late, swept, healed):
            row = self.get(ident)
            assert row.status is Status.EXPIRED
            assert row.finished_at is not None
        assert self.runs.requeue(late)
        assert self.get(late).expires_at is None
        assert self.runs.claim(late) is not None

    def payload(self) -> None:
        draft, approved = self.add(Status.PENDING), self.add(Status.APPROVED)
        with self.factory.begin() as session:
            session.get_one(self.entity, draft).actions = ["changed"]
        with self.factory() as session:
            session.get_one(self.entity, approved).actions = ["changed"]
            with pytest.raises(FrozenPayload):
                session.flush()
        assert self.get(draft).actions == ["changed"]
        assert self.get(approved).actions == ["a"]


@pytest.mark.parametrize("made", MODELS)
def test_every_verb_with_expiry_and_a_frozen_payload(bare: Engine, made: Callable[[], Classes]) -> None:
    classes = made()
    classes[0].metadata.create_all(bare)
    Drive(bare, classes).everything()


@pytest.mark.parametrize("where", ["table", "metadata", "translated"])
def test_the_same_in_a_schema(bare: Engine, where: str) -> None:
    with bare.begin() as connection:
        connection.execute(text('CREATE SCHEMA "app"'))
    if where == "translated":
        bare = bare.execution_options(schema_translate_map={None: "app"})
    classes = (
        plain(schema="app") if where == "table" else plain(MetaData(schema="app") if where == "metadata" else None)
    )
    classes[0].metadata.create_all(bare)
    Drive(bare, classes).everything()
    with bare.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM app.consent"))


@pytest.mark.parametrize(
    ("convention", "name"),
    [
        ({}, "ix_consent_expires_at"),
        ({"ix": "ix_%(column_0_label)s"}, "ix_consent_expires_at"),
        ({"ix": "index_%(table_name)s_%(constraint_name)s"}, "index_consent_expires_at"),
    ],
    ids=["none", "usual", "by constraint name"],
)
def test_the_index_follows_the_convention_and_stands_once_beside_the_others(
    bare: Engine, convention: dict[str, str], name: str
) -> None:
    classes = plain(MetaData(naming_convention=convention or None))
    classes[0].metadata.create_all(bare)
    Drive(bare, classes).expiry()
    with bare.connect() as connection:
        found = connection.execute(
            text("SELECT indexname, indexdef FROM pg_indexes WHERE indexdef LIKE '%(expires_at)%'")
        ).all()
    ((indexname, definition),) = found
    assert indexname == name
    assert "'may start'" in definition
    assert "'asked ''for'' 100%'" in definition


def test_a_siblings_overdue_run_is_left_alone(bare: Engine) -> None:
    child, step, _ = single_table()
    child.metadata.create_all(bare)
    root = inspect(child).inherits.class_
    drive = Drive(bare, (root, step, root))
    ident = drive.add(Status.PENDING)
    drive.expire(ident)
    runs: Runs[Any] = Runs(drive.factory, child, step)
    assert runs.reap() == 0
    assert not runs.heal(ident)
    assert drive.runs.reap() == 1


@pytest.mark.parametrize("made", [single_table, joined])
def test_a_childs_row_that_is_loaded_through_its_root_is_guarded_too(bare: Engine, made: Callable[[], Classes]) -> None:
    child, step, new = made()
    child.metadata.create_all(bare)
    drive = Drive(bare, (child, step, new))
    ident = drive.add(Status.APPROVED)
    root = inspect(child).inherits.class_
    with drive.factory() as session:
        session.get_one(root, ident).actions = ["changed"]
        with pytest.raises(FrozenPayload):
            session.flush()


def test_a_childs_own_column_cannot_be_frozen() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="maps no attribute 'own' to a column of table 'consent'"):

        class Consent(RunMixin, ExpiryMixin, Base):
            __tablename__ = "consent"
            __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "any"}
            __lifecycle__ = consent_lifecycle(frozen=("own",))
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]
            status: Mapped[Status] = consent_statuses.column()


def test_a_key_that_changes_together_with_the_payload_is_looked_up_by_what_it_was(bare: Engine) -> None:
    classes = composite()
    classes[0].metadata.create_all(bare)
    drive = Drive(bare, classes)
    ident = drive.add(Status.APPROVED)
    with drive.factory() as session:
        row = session.get_one(drive.entity, ident)
        row.number, row.actions = 999, ["changed"]
        with pytest.raises(FrozenPayload):
            session.flush()


def test_a_column_of_the_users_named_like_the_librarys_label_is_no_matter(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        until: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)
        key_0: Mapped[str | None]

    class ConsentStep(ReceiptMixin[Consent], Base):
        __tablename__ = "consent_step"

    Base.metadata.create_all(bare)
    Drive(bare, (Consent, ConsentStep, Consent)).everything()


def test_the_version_of_a_row_is_still_checked(bare: Engine) -> None:
    from sqlalchemy.orm.exc import StaleDataError

    class Base(DeclarativeBase):
        pass

    class Consent(RunMixin, ExpiryMixin, Base):
        __tablename__ = "consent"
        __lifecycle__ = consent_lifecycle(**LIFECYCLE)
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = consent_statuses.column()
        actions: Mapped[list[str]] = mapped_column(JSONB)
        version: Mapped[int] = mapped_column()
        __mapper_args__ = {"version_id_col": version}

    Base.metadata.create_all(bare)
    with Session(bare) as one, Session(bare) as other:
        one.add(Consent(status=Status.PENDING, actions=[]))
        one.commit()
        loaded = [session.scalars(select(Consent)).one() for session in (one, other)]
        loaded[0].actions = ["first"]
        one.commit()
        loaded[1].actions = ["second"]
        with pytest.raises(StaleDataError):
            other.flush()
