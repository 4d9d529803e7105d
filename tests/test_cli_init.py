"""``sqla-durable init``: a project's migrations, set up by Alembic's own command."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

from sqla_durable.alembic import template_folder
from tests.support_cli import answered, call, real, refused
from tests.test_cli import without


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configured() -> dict[str, str]:
    parser = ConfigParser()
    parser.read("alembic.ini")
    return {name: parser.get("alembic", name, raw=True) for name in parser.options("alembic")}


def test_it_makes_what_alembic_init_makes_of_the_template() -> None:
    said = answered("init", "migrations")
    for file in "env.py", "script.py.mako", "README":
        assert Path("migrations", file).read_bytes() == (template_folder() / file).read_bytes()
    assert Path("migrations/versions").is_dir()
    options = configured()
    assert options["script_location"] == "%(here)s/migrations"
    assert (options["metadata"], options["driver"]) == ("", "psycopg")
    assert "write into alembic.ini where your models are, as in  metadata = app.models:Base" in said
    assert said.endswith('  alembic revision --autogenerate -m "create the tables"\n  alembic upgrade head\n')


def test_the_models_and_the_driver_may_be_given() -> None:
    said = answered("init", "migrations", "--async", "--metadata", "app.models:Base,app.billing:Base.metadata")
    options = configured()
    assert (options["metadata"], options["driver"]) == ("app.models:Base, app.billing:Base.metadata", "psycopg_async")
    assert "where your models are" not in said


@pytest.mark.parametrize(
    "metadata", ["app.models", "app models:Base", "app.models:", "app/models.py:Base", "a:b\nc = d"]
)
def test_models_that_cannot_be_meant_are_refused_and_nothing_is_made(metadata: str) -> None:
    status, said = refused("init", "migrations", "--metadata", metadata)
    assert status == 2
    assert "does not name an object; write module:object, as in app.models:Base." in said
    assert not list(Path().iterdir())


def test_no_models_at_all_are_refused() -> None:
    assert refused("init", "migrations", "--metadata", " ") == (
        2,
        "sqla-durable init: --metadata is empty; write module:object, as in app.models:Base.",
    )


def test_a_folder_that_is_not_empty_is_refused_as_alembic_does() -> None:
    Path("migrations").mkdir()
    assert answered("init", "migrations")
    Path("alembic.ini").unlink()
    before = sorted(Path("migrations").iterdir())
    assert refused("init", "migrations") == (
        2,
        "sqla-durable init: Directory migrations already exists and is not empty",
    )
    assert sorted(Path("migrations").iterdir()) == before
    assert not Path("alembic.ini").exists()


def test_an_ini_file_that_leads_to_other_migrations_is_left_alone() -> None:
    Path("alembic.ini").write_text("[alembic]\nscript_location = elsewhere\n")
    status, said = refused("init", "migrations")
    assert status == 2
    assert 'alembic -c other.ini init -t "$(python -m sqla_durable.alembic)" migrations' in said
    assert Path("alembic.ini").read_text() == "[alembic]\nscript_location = elsewhere\n"
    assert not Path("migrations").exists()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    Path("file").write_text("")
    done = call("init", "file/migrations")
    assert (done.exit_code, done.stderr) == (1, "sqla-durable init: cannot make file/migrations: Not a directory.\n")


def test_without_alembic_it_says_what_to_install() -> None:
    ended = without("alembic", arguments=("init", "migrations"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == 'sqla-durable init: alembic is not installed; run: pip install "alembic>=1.19.2"\n'
    assert not list(Path().iterdir())


def test_it_needs_no_models_and_no_database(tmp_path: Path) -> None:
    ended = real("init", "migrations", "--metadata", "there.is.none:Base", cwd=tmp_path, DATABASE_URL="nonsense")
    assert (ended.returncode, ended.stderr) == (0, "")
