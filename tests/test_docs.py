"""What the README and the pages show is true: code runs, SQL is what is sent, commands exist, pages build."""

from __future__ import annotations

import code
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy import inspect as inspect_database
from sqlalchemy.orm import Session

import sqla_durable
from sqla_durable import Lifecycle, Retry, Run, Runs, StatusMachine, Worker, claim, fence, intent, receipt, step
from sqla_durable.demo.plan import PlanFile
from sqla_durable.receipt import ReceiptRows
from sqla_durable.run import RunRows
from tests.support import eventually, wait_until_blocked
from tests.support_statements import statements

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> Path | None:
        """The example that the block shows, named in its first line."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return EXAMPLES / found[1] if found else None


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    all_of_them = [Block(match[1], text.count("\n", 0, match.start(2)), match[2]) for match in found]
    return [block for block in all_of_them if block.language == language]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.fixture
def workplace(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty database in ``DATABASE_URL``, the examples at hand, and every engine put away afterwards."""
    before = set(sys.modules)
    monkeypatch.setenv("DATABASE_URL", empty_url)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(ROOT)]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(EXAMPLES)
    yield
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if name == "page" or Path(getattr(module, "__file__", None) or "").parent == EXAMPLES:
            dispose(module)
            del sys.modules[name]


def dispose(module: ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, Engine):
            value.dispose()


def run_program(*arguments: str) -> None:
    """Run Python as a reader would, and show what it printed if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# code


class Reader(code.InteractiveConsole):
    """Somebody who pastes into the interactive Python, where a block that is indented ends with an empty line."""

    def showsyntaxerror(self, *arguments: Any, **more: Any) -> None:
        raise  # noqa: PLE0704 - it is called while the error is handled

    showtraceback = showsyntaxerror

    def paste(self, block: Block, page: Path) -> None:
        for number, line in enumerate(block.text.splitlines(), block.line + 1):
            try:
                self.push(line)
            except Exception as error:
                error.add_note(f"{page.name}, line {number}: {line}")
                raise
        if self.buffer:
            self.push("")
        assert not self.buffer, f"{page.name}, line {block.line}: the block is not complete"


def test_the_tutorial_can_be_pasted_into_the_interactive_python(
    workplace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "displayhook", lambda _: None)
    page = DOCS / "tutorial.md"
    module = ModuleType("page")
    sys.modules["page"] = module
    reader = Reader(vars(module))
    for block in blocks(page, "python"):
        if block.file is None:
            reader.paste(block, page)


@pytest.mark.parametrize(
    "block", ["with open(__file__):\n    pass\nprint()\n", "def f():\n    a = 1\n\n    return a\n"]
)
def test_a_block_that_the_interactive_python_does_not_take_is_found(block: str) -> None:
    with pytest.raises(SyntaxError):
        Reader().paste(Block("python", 1, block), Path("page.md"))


def run_page(page: Path) -> None:
    module = ModuleType("page")
    sys.modules["page"] = module
    for block in blocks(page, "python"):
        if block.file is None:  # else it runs below, as a program
            compiled = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            exec(compiled, vars(module))
    dispose(module)


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.stem != "tutorial"], ids=named)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, workplace: None) -> None:
    run_page(page)
    if any(word in block.text for block in blocks(page, "python") for word in ("from plan_models", "drop_all(")):
        run_page(page)  # once more: a reader's database is not empty


@pytest.mark.parametrize("page", pages_with("python"), ids=named)
def test_a_file_that_a_page_shows_is_an_example_word_for_word(page: Path) -> None:
    shown = [block for block in blocks(page, "python") if block.file is not None]
    for block in shown:
        assert block.file is not None
        assert block.file.read_text() == block.text


PROGRAMS = [example for example in sorted(EXAMPLES.glob("*.py")) if example.stem != "worker"]  # which does not end


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: str(example.name))
def test_an_example_runs_as_a_program_and_runs_again(example: Path, workplace: None) -> None:
    runner = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"] if example.stem.startswith("test_") else []
    for _ in range(1 if runner else 2):
        run_program(*runner, str(example))


@pytest.mark.slow
def test_the_code_of_the_pages_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the extra dev has mypy")
    for page in pages_with("python"):
        lines: list[str] = []
        for block in blocks(page, "python"):
            if block.file is None:  # else it is checked among the examples
                lines += [""] * (block.line - len(lines)) + block.text.splitlines()
        module = re.sub(r"\W", "_", named(page).removesuffix(".md"))
        (tmp_path / f"{module}.py").write_text("\n".join(lines) + "\n")
    cache = ["--cache-dir", str(ROOT / ".mypy_cache" / "pages")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *cache, "."],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(EXAMPLES), str(ROOT), str(ROOT / "typings")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def sources() -> Iterator[tuple[str, str]]:
    """The code that a reader may run, by where it is; a file that pages show is one of the examples."""
    for page in pages_with("python"):
        yield named(page), "".join(block.text for block in blocks(page, "python") if block.file is None)
    for file in EXAMPLES.rglob("*.py"):
        yield named(file), file.read_text()


def test_pages_and_examples_share_no_table_unless_they_share_its_class() -> None:
    tables = [(table, where) for where, text in sources() for table in re.findall(r'__tablename__ = "(\w+)"', text)]
    places = {table: {where for name, where in tables if name == table} for table, _ in tables}
    assert not {table: where for table, where in places.items() if len(where) > 1}


SETUPS = {
    "outbox": "from outbox.database import create_tables; create_tables()",
    "branch_reset": "from branch_reset.database import create_tables; create_tables()",
    "fulfilment": "from fulfilment.database import create_tables; create_tables()",
    "approved_plan": "import os; from approved_plan.__main__ import prepare; prepare(os.environ['DATABASE_URL'])",
}


@pytest.mark.parametrize("example", SETUPS)
def test_processes_of_an_example_that_begin_at_once_make_its_tables_one_after_the_other(
    example: str, workplace: None
) -> None:
    engine = create_engine(os.environ["DATABASE_URL"])
    command = [sys.executable, "-c", SETUPS[example]]
    with engine.connect() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(4711)))
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            wait_until_blocked(engine, len(processes))
            connection.rollback()
            said = [process.communicate(timeout=60)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert inspect_database(engine).get_table_names()
    engine.dispose()


def test_the_worker_finishes_what_it_is_at_when_it_is_told_to_stop(workplace: None) -> None:
    models: Any = importlib.import_module("plan_models")
    plans: Any = importlib.import_module("carry_out_plan").plans
    engine = create_engine(os.environ["DATABASE_URL"])
    models.Base.metadata.create_all(engine)
    transfers = [{"payer": "ada", "payee": "ben", "amount": 10}] * 6

    def add(*rows: Any) -> list[Any]:
        with Session(engine) as session, session.begin():
            session.add_all(rows)
            session.flush()
            return [getattr(row, "id", None) for row in rows]

    add(*(models.Account(name=name, balance=100) for name in ("ada", "ben")))
    (first,) = add(models.Plan(status=models.PlanStatus.APPROVED, transfers=transfers))
    command = [sys.executable, str(EXAMPLES / "worker.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
        try:
            eventually(lambda: len(plans.receipts(first)) >= 2 or worker.poll() is not None, "two receipts")
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout is not None
            output = "".join(takewhile(lambda line: "draining: 1 run(s) under way" not in line, worker.stdout))
            (second,) = add(models.Plan(status=models.PlanStatus.APPROVED, transfers=transfers[:1]))
            output += worker.stdout.read()
            worker.wait(timeout=60)
        finally:
            worker.kill()
    engine.dispose()
    assert worker.returncode == 0, output
    assert "stopped" in output
    assert plans.get(first).status == "executed"
    assert plans.get(second).status == "approved", "no other plan was claimed"


def test_the_plan_file_that_a_page_shows_is_one() -> None:
    (shown,) = blocks(DOCS / "demo.md", "json")
    assert len(PlanFile.model_validate(json.loads(shown.text)).actions) == 3


# SQL


def with_constants(sql: str, constants: Mapping[str, Any]) -> str:
    """The text of a statement with its constants in place, and ``:name`` for what is bound when it is executed."""
    for name, value in constants.items():
        constant = "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)
        sql = sql.replace(f"%({name})s", constant)
    return re.sub(r"%\(durable_(\w+)\)s", r":\1", sql)


def compiled(engine: Engine, statement: Any) -> str:
    result = statement.compile(engine)
    return with_constants(str(result), {name: bind.value for name, bind in result.binds.items() if not bind.required})


def plain(sql: str) -> str:
    """SQL without casts of parameters and differences in white space."""
    sql = re.sub(r"::(TIMESTAMP WITH TIME ZONE|\w+)(\[\])?", "", sql)
    sql = re.sub(r"\s*([(),=])\s*", r"\1", sql)
    return " ".join(sql.split())


@pytest.fixture
def sent(workplace: None, database_url: str) -> Iterator[dict[str, str]]:
    """What the library sends for the plan of the tutorial, and to approve a payout."""
    models: Any = importlib.import_module("plan_models")
    payouts: Any = importlib.import_module("payout_models")
    runs, receipts = RunRows(models.Plan), ReceiptRows(models.PlanStep)
    engine = create_engine(database_url)
    for base in (models.Base, payouts.Base):
        base.metadata.create_all(engine)

    def transition(machine: StatusMachine[Any], to: Any) -> str:
        with statements(engine) as noted, Session(engine) as session:
            machine.transition(session, 1, to)
        given = noted.parameters[0].items()
        return with_constants(noted[0], {name: value for name, value in given if not name.startswith("durable_")})

    made = {
        "claim one": claim.claim_one(runs, run_now=False),
        "open": step.opens(runs, receipts),
        "seal": receipt.sealing(receipts),
        "record": step.records(runs, receipts),
        "issue": intent.issues(runs, receipts),
        "attach": intent.attaches(runs, receipts),
        "park": fence.park(runs, failed=False),
        "land": fence.land(runs, runs.lifecycle.done, {}, failed=False),
        "land together": fence.land_all_done(runs),
    }
    shown = {name: compiled(engine, statement) for name, statement in made.items()}
    shown["transition"] = transition(models.plan_statuses, models.PlanStatus.APPROVED)
    shown["approve"] = transition(payouts.payout_statuses, payouts.PayoutStatus.APPROVED)
    yield shown
    engine.dispose()


@pytest.mark.parametrize("page", pages_with("sql"), ids=named)
def test_the_sql_of_a_page_is_what_the_library_sends_or_else_runs(
    page: Path, sent: dict[str, str], database_url: str
) -> None:
    for block in blocks(page, "sql"):
        if not block.text.startswith("-- "):
            engine = create_engine(database_url)
            with engine.begin() as connection:
                connection.exec_driver_sql(block.text)
            engine.dispose()
            continue
        title, *parts = re.split(r"^\s*-- (?:\.\.\.)?", block.text.removeprefix("-- "), flags=re.MULTILINE)
        title, _, first = title.partition("\n")
        rest = plain(sent[title])
        for part in map(plain, [first, *parts]):
            assert part in rest, f"{page.name}, {title!r}: {part}\nis not in\n{rest}"
            rest = rest.partition(part)[2]
        assert "-- ..." in block.text or not rest, f"{page.name} leaves out the end of {title!r}: {rest}"


# commands


def commands() -> list[tuple[str, str]]:
    lines = [(page, line) for page in PAGES for block in blocks(page, "console") for line in block.text.splitlines()]
    given = [(named(page), line.removeprefix("$ ")) for page, line in lines if line.startswith("$ ")]
    return [(page, part) for page, line in given for part in line.split(" && ")]


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_that_is_shown_exists(page: str, command: str) -> None:
    words = command.split()
    match words:
        case ["pip", "install", *arguments] if of_ours := [each for each in arguments if each[:3] in {'".[', '"pa'}]:
            named_extras = re.fullmatch(r'"(?:\.|path/to/sqla_durable)\[([\w,]+)\]"', of_ours[0])
            assert named_extras is not None
            assert set(named_extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
        case ["pip", "install", requirement]:
            assert requirement[1:-1] in PROJECT["optional-dependencies"]["demo"]
        case ["cd" | "python", path]:
            assert (ROOT / path).is_dir() or (EXAMPLES / path).is_file()
        case ["sqla-durable", subcommand, *_]:
            target: str = PROJECT["scripts"]["sqla-durable"]
            module, function = target.split(":")
            assert callable(getattr(importlib.import_module(module), function))
            help_of_it = [sys.executable, "-m", module, subcommand, "--help"]
            assert subprocess.run(help_of_it, capture_output=True, timeout=60, check=False).returncode == 0
        case ["python", "-m", module, *_]:
            place = EXAMPLES / module.replace(".", "/")
            assert (
                place.with_suffix(".py").exists()
                or (place / "__main__.py").exists()
                or importlib.util.find_spec(module) is not None
            )
        case ["python", "-i", "-c", *_]:
            compile(command.split('"')[1], page, "exec")
        case ["pytest" | "ruff" | "mypy" | "pyright" | "lint-imports" | "sphinx-build" | "pre-commit" as tool, *_]:
            package = {"lint-imports": "import-linter", "sphinx-build": "sphinx"}.get(tool, tool)
            assert any(requirement.startswith(package) for requirement in PROJECT["optional-dependencies"]["dev"])
        case _ if words[0] in {"export", "alembic", "curl", "uvicorn", "kill"} or "psql" in words:
            pass  # tests/test_alembic_*.py do the same by Alembic's own functions, and tests/test_example_*.py run it
        case _:
            pytest.fail(f"{page} shows {command!r}; say in this test how such a command is checked")


def test_the_readme_shows_the_two_commands() -> None:
    shown = "".join(block.text for block in blocks(ROOT / "README.md", "console"))
    assert 'pip install -e ".[demo]" && sqla-durable demo\n' in shown
    assert 'pip install -e ".[dev]" && pytest\n' in shown


def test_a_link_from_outside_the_pages_leads_to_a_file() -> None:
    for page in sorted(ROOT.glob("*.md")):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), f"{page.name}: {link}"


# docstrings


def public_things() -> list[tuple[str, Any]]:
    from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWorker

    members = [
        (f"{owner.__name__}.{name}", member)
        for owner in (Runs, Run, AsyncRuns, AsyncRun, Worker, AsyncWorker, StatusMachine, Lifecycle, Retry)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    return [(name, getattr(sqla_durable, name)) for name in sqla_durable.__all__] + members


@pytest.mark.parametrize(("name", "thing"), public_things(), ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_public_says_in_a_sentence_what_it_is(name: str, thing: Any) -> None:
    first = (inspect.getdoc(thing) or "").split("\n\n")[0]
    assert re.match(r"[A-Z`]", first), f"{name} begins with {first!r}"
    assert re.search(r"[.:]$", first), f"{name} begins with {first!r}"


# pages


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra dev has Sphinx; without it there is nothing to build with")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_the_pages_build_without_a_warning(built: Path) -> None:
    assert (built / "index.html").exists()


def test_the_reference_has_every_public_name(built: Path) -> None:
    pages = "".join(page.read_text() for page in (built / "reference").glob("*.html"))
    missing = [name for name in sqla_durable.__all__ if f'id="sqla_durable.{name}"' not in pages]
    assert not missing
