"""What the demo says: line by line while it runs, and the receipts and the verdict at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from sqla_durable.demo.check import Tally
from sqla_durable.demo.kills import Kill
from sqla_durable.demo.models import Plan
from sqla_durable.demo.plan import Action, Label, Payment, PlanFile, StockMove
from sqla_durable.demo.process import Process
from sqla_durable.demo.watch import Committed, Sight

_WIDTH = 100
_LEASE = Plan.__lifecycle__.lease.total_seconds()


class Show:
    """Writes to a terminal with colours and a progress bar, elsewhere plain lines.

    :param console: where to write; one of :func:`console`.
    :param actions: the plan's actions.
    """

    def __init__(self, console: Console, actions: Sequence[Action]) -> None:
        self._console = console
        self._actions = actions
        self._began = time.monotonic()
        self._fence = 0
        self._holder: int | None = None
        self._seen: set[int] = set()
        self._idle: int | None = None
        self._progress = Progress(
            TextColumn("          "),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("steps committed"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=len(actions))

    def say(self, sentence: str) -> None:
        """Say something before it begins."""
        self._print(Text(sentence))

    def approved(self, plan: PlanFile, kills: int, seed: int) -> None:
        """Say what will be carried out, and how often it will be killed."""
        kinds = Counter(action.kind for action in plan.actions)
        steps = ", ".join(_many(number, kind.replace("_", " ")) for kind, number in kinds.items())
        self.say(f"A plan of {_many(len(plan.actions), 'step')} is approved: {steps}.")
        if kills:
            times = _many(kills, "time")
            self.say(f"The process that carries it out will be killed {times} (--kills {kills} --seed {seed}).")
            self.say(f"Each time, the next one waits until the lease of the one before, {_LEASE:g} s, has lapsed.")

    @contextmanager
    def live(self) -> Generator[None]:
        """Show the progress while the plan is carried out, and count time from here."""
        self._began = time.monotonic()
        self._print(Text())
        with self._progress:
            yield
        self._print(Text())

    # what happens, as Killer tells it

    def saw(self, process: Process, sight: Sight) -> None:
        """Show what is new of the plan: steps of the holder before, the takeover, steps of the new holder."""
        new = [step for step in sight.steps if step.position not in self._seen]
        for step in new:
            if step.fence <= self._fence:
                self._step(step)
        if sight.fence > self._fence:
            self._claim(process, sight, receipts=sum(step.fence < sight.fence for step in sight.steps))
        for step in new:
            if step.position not in self._seen:
                self._step(step)
        self._progress.update(self._task, completed=len(self._seen))

    def killed(self, kill: Kill) -> None:
        """Show a kill; before it, a process that found the plan executed, and had nothing to claim."""
        if kill.process != self._holder and kill.landed:
            self._event(
                "▶",
                "bold cyan",
                f"process {kill.process} finds that the plan has landed, and answers from its receipts",
            )
        fate = ": its transaction rolls back" if kill.inside else ""
        self._event("✗", "bold red", f"process {kill.process} killed {kill.where}{fate}")

    def _claim(self, process: Process, sight: Sight, receipts: int) -> None:
        verb = "takes over" if self._fence else "claims the plan"
        stand = f", {_many(receipts, 'receipt')} kept" if self._fence else ""
        self._fence, self._holder = sight.fence, process.pid
        self._event(
            "▶", "bold cyan", f"process {process.pid} {verb}: fence {sight.fence}, attempt {sight.attempts}{stand}"
        )

    def _step(self, step: Committed) -> None:
        self._seen.add(step.position)
        action = self._actions[step.position]
        if step.error is None:
            self._event("✓", "green", f"{step.position:>3}  {action!s:<48}  ", _result(action, step.result), dull=True)
        else:
            self._event("✗", "bold red", f"{step.position:>3}  {action!s:<48}  ", step.error)

    def _event(self, mark: str, style: str, what: str, result: str = "", *, dull: bool = False) -> None:
        seconds = f"{time.monotonic() - self._began:8.3f}  "
        self._print(
            Text.assemble((seconds, "dim"), (f"{mark}  ", style), (what, "" if dull else style), (result, "dim"))
        )

    # at the end

    def receipts(self, sight: Sight) -> None:
        """Show the receipts as a table, with a line between one holder and the next."""
        table = Table(title="The receipts", title_justify="left", width=_WIDTH, header_style="bold")
        for column in ("step", "action", "effect", "result", "fence"):
            justify: JustifyMethod = "left" if column in {"action", "effect"} else "right"
            table.add_column(column, justify=justify, no_wrap=True, ratio=1 if column == "action" else None)
        for step, following in zip_longest(sight.steps, sight.steps[1:]):
            action = self._actions[step.position]
            result = "failed" if step.error is not None else _result(action, step.result)
            cells = (step.position, action, step.effect, result, step.fence)
            last = following is None or following.fence != step.fence
            table.add_row(*(Text(str(cell)) for cell in cells), end_section=last)
        self._console.print(table)

    def verdict(self, sight: Sight, kills: Sequence[Kill], tallies: Sequence[Tally]) -> None:
        """Show what was counted, each fault, and one sentence that says it all."""
        table = Table(title="Counted", title_justify="left", header_style="bold")
        for column in ("what", "in the plan", "found", ""):
            table.add_column(column, justify="right" if column in {"in the plan", "found"} else "left")
        for tally in tallies:
            table.add_row(tally.what, str(tally.wanted), str(tally.found), _judged(tally))
        self._console.print(table)
        for tally in tallies:
            for fault in tally.faults:
                self._print(Text(f"✗ {tally.what}: {fault}", "bold red"))
        if sight.error is not None:
            self._print(Text(f"✗ the plan ended as {sight.status.value}: {sight.error}", "bold red"))
        inside = sum(kill.inside for kill in kills)
        survived = f"{_many(len(kills), 'kill')}, {inside} of them inside a transaction; " if kills else ""
        how = f"{survived}{_many(sight.attempts, 'attempt')}, fence {sight.fence}"
        if kills and sight.attempts <= len(kills):
            how += " (a kill before the claim or after the landing calls for no further attempt)"
        if sight.error is None and not any(tally.faults for tally in tallies):
            self._print(Text(f"✓ {_praised(self._actions)}: {how}.", "bold green"))
        else:
            self._print(Text(f"✗ Not as planned: {how}.", "bold red"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def make_console() -> Console:
    """Return a console on standard output, as wide as a log should be where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _result(action: Action, result: object) -> str:
    match action:
        case StockMove():
            return f"{result} left"
        case Payment():
            return f"{result} € left"
        case Label():
            return f"{result}"


def _praised(actions: Sequence[Action]) -> str:
    external = sum(isinstance(action, Label) for action in actions)
    if external == len(actions):
        return "Every external effect is there at least once"
    labels = ", and every external one at least once" if external else ""
    return f"Every effect in the database is there exactly once{labels}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _judged(tally: Tally) -> Text:
    if tally.faults:
        return Text("wrong", "bold red")
    if tally.found > tally.wanted:
        return Text(f"{tally.right}: {tally.found - tally.wanted} again, after a kill", "yellow")
    return Text(tally.right, "green")
