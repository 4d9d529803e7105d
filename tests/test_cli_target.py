"""TARGET: what it may name, and what is said where it names nothing of use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, ReceiptMixin, RunMixin, Runs
from tests.support import Plan, PlanStep, approved_plan
from tests.support_cli import FORMS, answered, importable, lines, made, real, refused
from tests.support_models import JobStatus, jobs, lifecycle
from tests.test_models_inheritance import Fetch, Job, Single

KINDS = (
    "a Runs, an AsyncRuns, a Functions of either form, a run class with --url, or a callable that returns one of these."
)


@pytest.fixture(autouse=True)
def no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)


# what it may name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["runs", "nested.runs", "make", "nested.make"])
def test_it_is_an_attribute_however_deep_or_what_a_callable_returns(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch, form: str, path: str
) -> None:
    approved_plan(session_factory)
    here = {"runs": made(form, engine), "make": lambda optional=1: made(form, engine)}
    module = importable(monkeypatch, **here, nested=SimpleNamespace(**here))
    assert len(lines("runs", f"{module}:{path}")) == 1


def test_it_is_a_run_class_with_the_url_of_a_database(
    engine: Engine, session_factory: sessionmaker[Session], empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = approved_plan(session_factory)
    Runs(session_factory, Plan, PlanStep).execute(ident, lambda run: run.step("a", lambda session: 7))
    bare = empty_url.replace("postgresql+psycopg://", "postgresql://")
    target = "tests.support:Plan"
    (shown,) = lines("show", target, ident, "--url", bare)
    assert shown["receipts"][0]["result"] == 7, "its receipts are found"
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    assert len(lines("runs", target, "--url", empty_url)) == 1, "--url comes before DATABASE_URL"
    monkeypatch.setenv("DATABASE_URL", bare)
    assert len(lines("runs", target)) == 1


def test_a_subclass_has_the_receipts_of_its_base(empty_url: str) -> None:
    engine = create_engine(empty_url)
    Single.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Job(), Fetch()])
    engine.dispose()
    assert len(lines("runs", "tests.test_models_inheritance:Job", "--url", empty_url)) == 2
    assert len(lines("runs", "tests.test_models_inheritance:Fetch", "--url", empty_url)) == 1


@pytest.mark.parametrize("name", ["app", "package.models"])
def test_the_current_folder_is_importable(tmp_path: Path, engine: Engine, empty_url: str, name: str) -> None:
    file = tmp_path / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("from tests.support import Plan")
    done = real("runs", f"{name}:Plan", "--url", empty_url, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no runs\n")


# what is refused


class Lonely(DeclarativeBase):
    pass


class Alone(RunMixin, Lonely):
    """Has no receipts."""

    __tablename__ = "alone"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class Twice(RunMixin, Lonely):
    __tablename__ = "twice"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class OneStep(ReceiptMixin[Twice], Lonely):
    __tablename__ = "one_step"


class OtherStep(ReceiptMixin[Twice], Lonely):
    __tablename__ = "other_step"


async def coroutine() -> None: ...


def with_arguments(url: str) -> None: ...


def with_an_error_of_ours() -> None:
    raise ConfigurationError("this cannot\nwork.")


HERE = __name__


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("app", "'app' does not name an object; write module:object, as in app.models:plans."),
        ("app:", "'app:' does not name an object"),
        (":plans", "'' is not the name of a module; write module:object, as in app.models:plans."),
        ("app/models.py:plans", "'app/models.py' is not the name of a module"),
        (".app:plans", "'.app' is not the name of a module"),
        ("no_such_app:plans", f"there is no module 'no_such_app', neither installed nor in {Path.cwd()}."),
        ("no_such_app.models:plans", "there is no module 'no_such_app'"),
        ("tests.no_such:plans", "there is no module 'tests.no_such'"),
        ("json.decoder.deeper:plans", "there is no module 'json.decoder.deeper'"),
        (f"{HERE}:plans", f"{HERE} has no attribute 'plans'."),
        (f"{HERE}:Alone.runs.deeper", f"{HERE}.Alone has no attribute 'runs'."),
        (f"{HERE}:", "does not name an object"),
        (f"{HERE}:HERE", f"{HERE}:HERE is '{HERE}'; expected {KINDS}"),
        (f"{HERE}:Lonely", f"Lonely'>; expected {KINDS}"),
        ("sqla_durable:RunMixin", f"RunMixin'>; expected {KINDS}"),
        (f"{HERE}:dict", "has no attribute 'dict'"),
        (f"{HERE}:coroutine", f"{HERE}:coroutine is a coroutine function; a callable that returns the object"),
        (f"{HERE}:with_arguments", f"{HERE}:with_arguments is called without arguments, but missing a required arg"),
        ("tests.support:plan_statuses", f"is <StatusMachine of PlanStatus>; expected {KINDS}"),
        (
            "tests.support:Plan",
            "tests.support:Plan is a run class, which has no engine; give --url, or set DATABASE_URL.",
        ),
    ],
)
def test_a_target_that_is_none_is_explained_in_one_line(target: str, said: str) -> None:
    exit_code, line = refused("runs", target)
    assert said in line
    assert exit_code == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Alone", "no class that was imported holds the receipts of Alone; name a Runs, which says whose it uses."),
        ("Twice", f"{HERE}.OneStep, {HERE}.OtherStep hold the receipts of Twice; name a Runs, which says whose"),
    ],
)
def test_a_run_class_without_one_class_of_receipts_is_refused(name: str, said: str) -> None:
    exit_code, line = refused("runs", f"{HERE}:{name}", "--url", "postgresql://")
    assert exit_code == 2
    assert said in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "is not a URL of a database, as in postgresql://user@host/database."),
        ("mysql://secret@host/x", "names mysql; sqla_durable needs PostgreSQL."),
    ],
)
def test_a_url_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    assert refused("runs", "tests.support:Plan", "--url", url) == (2, f"sqla-durable runs: --url {said}")
    monkeypatch.setenv("DATABASE_URL", url)
    assert refused("runs", "tests.support:Plan") == (2, f"sqla-durable runs: DATABASE_URL {said}")


@pytest.mark.parametrize(("form", "name"), [("sync", "Runs"), ("asyncio", "AsyncRuns")])
def test_a_url_for_what_has_an_engine_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    target = f"{importable(monkeypatch, runs=made(form, engine))}:runs"
    exit_code, line = refused("runs", target, "--url", "postgresql://")
    assert exit_code == 2
    assert line.endswith(f"--url goes with a run class, but {target} is a {name}, which has an engine.")
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    assert answered("runs", target, "--json") == "", "DATABASE_URL is for run classes"


# errors of others


def test_a_module_that_cannot_import_something_shows_what_and_where(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import not_installed_here")
    done = real("runs", "app:plans", cwd=tmp_path)
    assert done.returncode == 1
    assert 'app.py", line 1, in <module>' in done.stderr
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'not_installed_here'\n")


def test_a_package_that_cannot_import_itself_shows_where(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("import app.missing")
    done = real("runs", "app.models:plans", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "No module named 'app.missing'" in done.stderr


def test_an_error_of_ours_is_one_line() -> None:
    assert refused("runs", f"{HERE}:with_an_error_of_ours") == (1, "sqla-durable runs: this cannot work.")


@pytest.mark.parametrize("form", FORMS)
def test_a_database_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    away = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    target = f"{importable(monkeypatch, runs=made(form, away))}:runs"
    ident = UUID(int=1)
    for command, *arguments in (["runs"], ["runs", "--counts"], ["show", ident], ["requeue", ident], ["reap"]):
        exit_code, line = refused(command, target, *arguments)
        assert exit_code == 1
        assert line.startswith(f"sqla-durable {command}: cannot reach the database: ")
        assert line.endswith("; check DATABASE_URL or --url")
        assert "127.0.0.1" in line


@pytest.mark.parametrize("form", FORMS)
def test_a_table_that_is_not_there_is_one_line(empty_url: str, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    engine = create_engine(empty_url)
    target = f"{importable(monkeypatch, runs=made(form, engine))}:runs"
    exit_code, line = refused("runs", target)
    assert exit_code == 1
    assert line.startswith('sqla-durable runs: relation "plan" does not exist; create the tables first, by your migrat')
    engine.dispose()


def test_an_engine_of_another_database_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{importable(monkeypatch, runs=made('sync', create_engine('sqlite://')))}:runs"
    exit_code, line = refused("runs", target)
    assert exit_code == 1
    assert "is not PostgreSQL through psycopg 3" in line


def test_a_fault_in_a_program_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def make():\n    return 1 / 0\n")
    done = real("runs", "app:make", cwd=tmp_path)
    assert done.returncode == 1
    assert 'app.py", line 2, in make' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
