"""The type matrix goes through a real JSONB value: what a replay decodes is what PostgreSQL handed back."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import ipaddress
import json
import math
import pathlib
import re
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Union
from zoneinfo import ZoneInfo

import psycopg
import pytest
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    RootModel,
    SecretStr,
    computed_field,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from sqla_durable.codec import Codec, codec_for
from sqla_durable.exc import ReceiptMismatch, ResultError, UsageError

if TYPE_CHECKING:
    from fractions import Fraction as OnlyForTypeCheckers

Jsonb = Callable[[str], Any]


@pytest.fixture(scope="module")
def jsonb(database_url: str) -> Iterator[Jsonb]:
    """Store a text as JSONB and return what psycopg makes of it, as a replay does."""
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE TEMPORARY TABLE receipt (id int GENERATED ALWAYS AS IDENTITY, result jsonb)")

        def stored(text: str) -> Any:
            insert = "INSERT INTO receipt (result) VALUES (%s) RETURNING id"
            (row,) = connection.execute(insert, [text]).fetchone() or (None,)
            (result,) = connection.execute("SELECT result FROM receipt WHERE id = %s", [row]).fetchone() or (None,)
            return result

        yield stored


def returning(annotation: Any) -> Codec[Any]:
    def step() -> None: ...

    step.__annotations__ = {"return": annotation}
    return codec_for(step)


def unannotated() -> Codec[Any]:
    return codec_for(lambda: None)


class Colour(enum.Enum):
    RED = "red"
    GREEN = 2
    PAIR = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Line(BaseModel):
    sku: str
    price: Decimal
    at: datetime | None = None


class Cat(BaseModel):
    kind: Literal["cat"] = Field(default="cat", alias="petKind")
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = Field(default="dog", alias="petKind")
    tags: set[str]


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Cat | Dog = Field(discriminator="kind")

    @computed_field
    @property
    def description(self) -> str:
        return "computed"

    @functools.cached_property
    def cached(self) -> object:
        return object()


class Aliased(BaseModel):
    one_way: int = Field(serialization_alias="out")
    other_way: int = Field(validation_alias=AliasChoices("in", "inwards"))
    both: int = Field(alias="bothWays")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    known: int


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    day: date
    pair: tuple[int, ...]
    raw: bytes


class Binary(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    raw: bytes


class Raw(BaseModel):
    raw: bytes


class Ids(RootModel[list[int]]):
    pass


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    rows: list[T]


class Counted(BaseModel):
    shown: int
    _seen: int = PrivateAttr(default=0)


class Trimmed(BaseModel):
    kept: int
    dropped: int = Field(default=0, exclude=True)


@dataclass
class Point:
    x: int
    y: float
    label: Optional[str] = None  # noqa: UP045  both spellings are in use
    seen: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    at: datetime


@dataclass
class Blob:
    raw: bytes


class Part(TypedDict):
    raw: bytes


@pydantic_dataclass
class Checked:
    n: int


class Row(NamedTuple):
    id: int
    name: str


class Shape(TypedDict, total=False):
    sides: int
    name: str


class Base(BaseModel):
    a: int


class Derived(Base):
    b: int = 2


class Opaque:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    def __hash__(self) -> int:
        return 1


BERLIN = ZoneInfo("Europe/Berlin")
EVERY_CHARACTER = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x10000), 0x1F600, 0x10FFFF]))

RETURNED: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, 0),
    (int, -(2**63) - 1),
    (int, 2**63),
    (int, 10**4000),
    (float, 0.1),
    (float, 1.0),
    (float, 1e15),
    (float, 1e16),
    (float, -1e16),
    (float, 1.7976931348623157e308),
    (float, 1e-7),
    (float, 5e-324),
    (int | float, 1e22),
    (int | float, 1.0),
    (int | float, 1),
    (bool | int, True),
    (bool | int, 1),
    (str, ""),
    (str, EVERY_CHARACTER),
    (str, '"1e16", -0.0, NaN \\u0000 {\\'),
    (str, r"\u0000"),
    (int | str, "1"),
    (int | str, 1),
    (Union[str, int], 1),  # noqa: UP007  both spellings are in use
    (Optional[int], None),  # noqa: UP045
    (bytes, b""),
    (bytes, b"text"),
    (bytes, b"\x00\xff\xfe"),
    (list[bytes], [b"\xff", b"aGk="]),
    (bytes | None, b"\xff"),
    (Decimal, Decimal("1.10")),
    (Decimal, Decimal("1E+5")),
    (Decimal, Decimal("-0.00")),
    (Decimal, Decimal("1e-400")),
    (Decimal, Decimal("123456789012345678901234567890.123456789")),
    (uuid.UUID, uuid.UUID(int=5)),
    (date, date.max),
    (datetime, datetime(2024, 2, 29, 12, 0, 0, 1)),
    (datetime, datetime.min),
    (datetime, datetime(2024, 1, 1, tzinfo=UTC)),
    (datetime, datetime(2024, 7, 1, 1, 2, 3, 456789, tzinfo=BERLIN)),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=0, tzinfo=BERLIN)),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)),
    (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30)))),
    (clock, clock(23, 59, 59, 999999)),
    (clock, clock(1, tzinfo=UTC)),
    (timedelta, timedelta(microseconds=-1)),
    (timedelta, timedelta(days=-3, microseconds=5)),
    (timedelta, timedelta.max),
    (timedelta, timedelta.min),
    (Colour, Colour.RED),
    (Colour, Colour.GREEN),
    (Level, Level.LOW),
    (Mode, Mode.FAST),
    (list[Mode], [Mode.FAST]),
    (dict[Mode, Level], {Mode.FAST: Level.LOW}),
    (Access, Access.READ | Access.WRITE),
    (Literal["a", 1], 1),
    (Decimal | str, Decimal("1.10")),
    (Decimal | str, "words"),
    (date | str, date(2024, 1, 1)),
    (str | uuid.UUID, "words"),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], ()),
    (tuple[tuple[int, ...], list[int]], ((1,), [2])),
    (set[int], {3, 1, 2}),
    (frozenset[str], frozenset({"b", "a"})),
    (set[tuple[int, str]], {(1, "a"), (2, "b")}),
    (collections.deque[int], collections.deque([1, 2])),
    (dict[int, str], {10: "a", 9: "b"}),
    (dict[uuid.UUID, date], {uuid.UUID(int=1): date(2024, 1, 1)}),
    (dict[date, list[Decimal]], {date(2024, 1, 1): [Decimal("1.10")]}),
    (dict[bool, int], {True: 1, False: 0}),
    (dict[str, int], {"zz": 1, "a": 2, "é": 3, "\U0001f600": 4, "\uffff": 5, "": 6}),
    (collections.OrderedDict[str, int], collections.OrderedDict(a=1, bb=2)),
    (collections.Counter[str], collections.Counter("hello")),
    (collections.defaultdict[str, int], collections.defaultdict(int, b=1, a=2)),
    (Line, Line(sku="x", price=Decimal("1.10"), at=datetime(2024, 1, 1, tzinfo=UTC))),
    (list[Line] | None, [Line(sku="x", price=Decimal("0.0"))]),
    (Owner, Owner(pet=Cat(petKind="cat", lives=9))),
    (Owner, Owner(pet=Dog(petKind="dog", tags={"a", "b"}))),
    (Aliased, Aliased(**{"one_way": 1, "in": 2, "bothWays": 3})),
    (Open, Open(known=1, zz={"b": [1, 2.0], "a": None}, b=1)),
    (Strict, Strict(day=date(2024, 1, 1), pair=(1, 2), raw=b"utf8")),
    (Binary, Binary(raw=b"\xff\x00")),
    (list[Binary], [Binary(raw=b"\xff")]),
    (Ids, Ids([1, 2])),
    (Tree, Tree(name="a", children=[Tree(name="b", children=[Tree(name="c")])])),
    (Page[Line], Page[Line](rows=[Line(sku="x", price=Decimal(1))])),
    (Counted, Counted(shown=1)),
    (Base | Derived, Derived(a=1)),
    (Point, Point(1, 2.0, None, [3])),
    (list[Point | None], [Point(1, 1e300), None]),
    (Blob, Blob(b"\xff\x00")),
    (list[Blob | None], [Blob(b"\xff\x00")]),
    (Part, {"raw": b"\xff\x00"}),
    (Frozen, Frozen(datetime(2024, 7, 1, tzinfo=BERLIN))),
    (Checked, Checked(1)),
    (Row, Row(1, "a")),
    (list[Row], [Row(1, "a")]),
    (Shape, {"sides": 3}),
    (Shape, {}),
    (ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1")),
    (ipaddress.IPv6Network, ipaddress.IPv6Network("fe80::/64")),
    (pathlib.Path, pathlib.Path("a/b")),
    (re.Pattern[str], re.compile("a+")),
    (complex, 1 + 2j),
    (Annotated[int, Field(gt=0)], 5),
    (Annotated[int, {}], 5),
    (Any, None),
    (Any, {"b": [1, 1.0, True, None, "x"], "aaa": {"": -1.5e-9, "n": 1e300}}),
    (object, [1e16, 10**16, [], {}]),
    (dict[str, Any], {"k": [1, 2.0]}),
]


def labels(cases: list[Any]) -> list[str]:
    """The same for every worker: without addresses, or the order of a set."""
    return [
        f"{getattr(case[0], '__name__', 'annotation')} {type(case[1]).__name__} {n}" for n, case in enumerate(cases)
    ]


def exactly(value: Any) -> Any:  # noqa: PLR0911
    """A rendering that differs where value or type does, made without the code under test."""
    kind = type(value)
    if isinstance(value, BaseModel):
        own = {**dict(value), **(value.__pydantic_private__ or {})}
        return kind, {name: exactly(part) for name, part in own.items()}
    if hasattr(value, "__dataclass_fields__"):
        return kind, {name: exactly(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return kind, {(type(key), key): exactly(part) for key, part in value.items()}
    if isinstance(value, list | tuple | collections.deque) and kind.__module__ != "enum":
        return kind, [exactly(part) for part in value]
    if isinstance(value, set | frozenset):
        return kind, {repr(exactly(part)) for part in value}
    if isinstance(value, datetime) and value.tzinfo:
        return kind, value.astimezone(UTC).isoformat(), value.utcoffset()
    return kind, str(value) if isinstance(value, Decimal) else value


def keys_in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, keys_in_order(part)) for key, part in value.items()]
    return [keys_in_order(part) for part in value] if isinstance(value, list | tuple) else None


@pytest.mark.parametrize(("annotation", "value"), RETURNED, ids=labels(RETURNED))
def test_first_run_and_replay_return_what_the_function_did(annotation: Any, value: Any, jsonb: Jsonb) -> None:
    codec = returning(annotation)
    text, first = codec.round_trip(value, "charge")
    stored = jsonb(text)
    replay = codec.decode(stored, "charge")
    assert exactly(first) == exactly(value)
    assert exactly(replay) == exactly(value)
    assert keys_in_order(first) == keys_in_order(replay)
    assert keys_in_order(json.loads(text)) == keys_in_order(stored), "the text is not in JSONB's order"
    assert codec.encode(value, "charge") == text


@pytest.mark.parametrize(
    ("annotation", "value", "zero"),
    [
        (float, -0.0, "0.0"),
        (int | float, -0.0, "0.0"),
        (list[float], [-0.0, -0.05], "[0.0, -0.05]"),
        (Any, {"-0.0": -0.0}, "{'-0.0': 0.0}"),
    ],
)
def test_a_negative_zero_is_a_zero_on_the_first_run_as_on_each_replay(
    annotation: Any, value: Any, zero: str, jsonb: Jsonb
) -> None:
    codec = returning(annotation)
    text, first = codec.round_trip(value, "s")
    assert repr(first) == repr(codec.decode(jsonb(text), "s")) == zero


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append({"self": value})
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ShortDecimal = Annotated[Decimal, PlainSerializer(float)]
SwappedNumbers = Annotated[list[int | float], BeforeValidator(lambda numbers: numbers[::-1])]
BASE64 = "ser_json_bytes"
EXACTLY = "annotate the function with exactly the type that it returns"

REFUSED: list[tuple[Any, Any, str, str]] = [
    # JSONB cannot hold it
    (str, "a\0b", "result", "NUL"),
    (Any, {"items": [0, {"name": "\0"}]}, "result.items[1].name", "NUL"),
    (dict[str, int], {"a\0": 1}, "a key of result", "NUL"),
    (list[Line], [Line(sku="x\0", price=Decimal(1))], "result[0].sku", "NUL"),
    (Row, Row(1, "a\0"), "result.name", "NUL"),
    (Raw, Raw(raw=b"\0"), "result.raw", "NUL"),
    (str, "\ud800", "result", "surrogate"),
    (list[Point], [Point(1, 1.0), Point(1, 1.0, "\udc80")], "result[1].label", "surrogate"),
    (Any, {"k": {"\udfff": 1}}, "a key of result.k", "surrogate"),
    (float, math.nan, "result", "nan"),
    (float | None, math.inf, "result", "inf"),
    (Any, [{"a b": -math.inf}], "result[0]['a b']", "-inf"),
    (list[float], [1.0, math.nan], "result[1]", "nan"),
    (Point, Point(1, math.nan), "result.y", "nan"),
    (dict[float, int], {math.nan: 1}, "result", "key nan (float)"),
    (Decimal, Decimal("NaN"), "result", "NaN"),
    (dict[str, Decimal], {"a": Decimal("Infinity")}, "result.a", "Infinity"),
    (Any, cyclic(), "result[1].self", "contains itself"),
    (list[Any], cyclic(), "result[1].self", "contains itself"),
    (Any, nested(230), "result[0][0]", "200 levels"),
    (Any, nested(5_000), "result[0][0]", "200 levels"),
    (int, 10**5000, "result", "number out of range"),
    # pydantic cannot write it
    (Any, {"a": [Opaque()]}, "result.a[0]", "Opaque"),
    (Any, {1: object}, "result[1]", "type"),
    (Raw, Raw(raw=b"\xff"), "result.raw", BASE64),
    (list[Raw], [Raw(raw=b""), Raw(raw=b"\xff")], "result[1].raw", BASE64),
    # it would come back as another type
    (Any, (1, 2), "result", "a replay would return list"),
    (Any, [{"a": (1,)}], "result[0].a", "a replay would return list"),
    (Any, {1: "a"}, "result", "key 1 (int)"),
    (Any, {1: 2, "1": 2}, "result", "key 1 (int)"),
    (Any, {"at": datetime(2024, 1, 1)}, "result.at", "datetime"),
    (Any, Decimal("1.0"), "result", "Decimal"),
    (Any, {1, 2}, "result", "set"),
    (Any, Line(sku="x", price=Decimal(1)), "result", "Line"),
    (Any, [Level.LOW], "result[0]", "Level"),
    (Any, Point(1, 2.0), "result", "Point"),
    (int, True, "result", "bool"),
    (int, 1.0, "result", "float"),
    (float, 1, "result", "int"),
    (list[int], [1, 2, True], "result[2]", "bool"),
    (list[float], [0.5, 2], "result[1]", "int"),
    (list[float], [1, 2], "result[0]", "int"),
    (list[SwappedNumbers], [[1, 1.0]], "result[0][0]", "would return float"),
    (dict[str, int], {"a": True}, "result.a", "bool"),
    (Open, Open(known=1, more=(1, 2)), "result.more", "tuple"),
    (set[int], {2, True}, "result", "element True (bool)"),
    (dict[int, int], {True: 1}, "result.True", "valid integer"),
    (int, "5", "result", "str"),
    (str, Mode.FAST, "result", "Mode"),
    (str, 5, "result", "valid string"),
    (None, 0, "result", EXACTLY),
    (Decimal | str, "1.1", "result", "would return Decimal"),
    (uuid.UUID | str, str(uuid.UUID(int=1)), "result", "would return UUID"),
    (date | str, "2024-01-01", "result", "would return date"),
    (str | Decimal, Decimal("1.1"), "result", "would return str"),
    (list[str | date], ["", date(2024, 1, 1)], "result[1]", "would return str"),
    (list[int] | tuple[int, ...], (1,), "result", "tuple"),
    (Base, Derived(a=1), "result", "Derived"),
    (list[Base], [Base(a=1), Derived(a=1)], "result[1]", "Derived"),
    (list[int], collections.UserList([1]), "result", "UserList"),
    (Iterable[int], [1], "result", EXACTLY),
    (Callable[[], int], len, "result", "builtin_function"),
    # it would come back with another value
    (SecretStr, SecretStr("hunter2"), "result", "SecretStr"),
    (dict[str, SecretStr], {"key": SecretStr("hunter2")}, "result.key", "SecretStr"),
    (Trimmed, Trimmed(kept=1, dropped=5), "result.dropped", "unequal"),
    (re.Pattern[str], re.compile("a", re.IGNORECASE), "result", "Pattern"),
    (collections.OrderedDict[str, int], collections.OrderedDict(bb=1, a=2), "result", "OrderedDict"),
    (collections.deque[int], collections.deque([1], maxlen=3), "result", "deque"),
    (datetime, datetime(2024, 10, 27, 2, 30, fold=1), "result", "datetime"),
    (clock, clock(1, tzinfo=BERLIN), "result", "time"),
    (Annotated[int, PlainSerializer(lambda n: n + 1)], 1, "result", "int"),
    (
        Annotated[list[int], BeforeValidator(lambda it: it[:1])],
        [1, 2],
        "result",
        "list, and a replay would return an unequal one",
    ),
    (ShortDecimal, Decimal("1.10"), "result", "unequal"),
    (list[ShortDecimal], [Decimal("1.10")], "result[0]", "unequal"),
    (Annotated[int, PlainSerializer(lambda n: 1 / 0)], 1, "result", "division by zero"),
    (Annotated[int, BeforeValidator(lambda n: {}[n])], 1, "result", "KeyError"),
]


@pytest.mark.parametrize(("annotation", "value", "path", "reason"), REFUSED, ids=labels(REFUSED))
def test_what_would_not_come_back_is_refused_with_step_and_path(
    annotation: Any, value: Any, path: str, reason: str
) -> None:
    with pytest.raises(ResultError) as caught:
        returning(annotation).round_trip(value, "charge")
    message = str(caught.value)
    assert message.startswith(f"step 'charge': {path}"), message
    assert message[len(f"step 'charge': {path}")] in " .[:", message
    assert reason in message
    assert "hunter2" not in message


def test_a_private_attribute_that_is_not_stored_is_refused() -> None:
    counted = Counted(shown=1)
    counted._seen = 5
    with pytest.raises(ResultError, match=r"result\._seen"):
        returning(Counted).round_trip(counted, "s")


def test_an_attribute_beside_the_fields_of_a_dataclass_is_refused() -> None:
    point = Point(1, 2.0)
    point.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(ResultError, match=r"result\.extra is int"):
        returning(Point).round_trip(point, "s")


def test_a_cached_property_is_no_part_of_the_value() -> None:
    owner = Owner(pet=Cat(petKind="cat", lives=1))
    assert owner.cached is owner.cached
    assert returning(Owner).round_trip(owner, "s")[1] == owner


def test_a_number_that_the_configuration_writes_as_a_constant_is_refused() -> None:
    class Limit(RootModel[float]):
        model_config = ConfigDict(ser_json_inf_nan="constants")

    with pytest.raises(ResultError, match=r"result.* inf, which JSONB"):
        returning(Limit).round_trip(Limit(math.inf), "s")


def test_a_constant_that_a_serializer_makes_up_is_refused() -> None:
    class Limit(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan="constants")
        limit: Annotated[str, PlainSerializer(lambda _: math.inf, return_type=float)]

    with pytest.raises(ResultError, match="'s': result holds inf, which JSONB"):
        returning(Limit).round_trip(Limit(limit="none"), "s")


def test_a_result_larger_than_jsonb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqla_durable.storable._MAX_BYTES", 1000)
    assert returning(str).round_trip("x" * 990, "s")
    with pytest.raises(ResultError, match="256 MiB"):
        returning(str).round_trip("x" * 1000, "s")
    with pytest.raises(ResultError, match="256 MiB"):
        returning(list[int]).round_trip([1] * 100, "s")


def test_the_reason_for_a_refusal_is_found_in_a_wide_value() -> None:
    value = {"rows": [{"n": n} for n in range(5000)] + [{"n": "\0"}]}
    with pytest.raises(ResultError, match=r"result\.rows\[5000\]\.n contains a NUL"):
        unannotated().round_trip(value, "s")


@pytest.mark.parametrize(
    ("annotation", "stored", "path"),
    [
        (int, "x", "result"),
        (None, 1, "result"),
        (list[Line], [{"sku": "x", "price": "1"}, {"sku": "x"}], "result[1].price"),
        (Owner, {"pet": {"kind": "fish"}}, "result.pet"),
        (Owner, {"pet": {"kind": "cat", "lives": 1}, "unknown": 1}, "result.unknown"),
    ],
)
def test_a_receipt_that_no_longer_decodes_is_a_mismatch(annotation: Any, stored: object, path: str) -> None:
    with pytest.raises(ReceiptMismatch, match="step 'charge': the receipt") as caught:
        returning(annotation).decode(stored, "charge")
    assert f": {path} cannot be rebuilt" in str(caught.value)


@pytest.mark.parametrize("kind", [Blob, Part, Raw, Binary])
def test_bytes_are_written_alike_however_the_annotation_grows(kind: Any) -> None:
    value = kind(raw=b"abcd")
    text = returning(kind).encode(value, "s")
    assert returning(kind | None).encode(value, "s") == text
    assert returning(list[kind]).encode([value], "s") == f"[{text}]"


def test_a_receipt_written_under_aliases_is_read_as_well() -> None:
    assert returning(Aliased).decode({"one_way": 1, "in": 2, "bothWays": 3}, "s").both == 3


def test_a_first_run_returns_a_value_of_its_own() -> None:
    mine = [1]
    assert returning(list[int]).round_trip(mine, "s")[1] is not mine


def annotated(n: int) -> tuple[int, ...]:
    return (n,)


def lines() -> list[Line]:
    return [Line(sku="x", price=Decimal("1.0"))]


async def coroutine() -> tuple[int, ...]:
    return (1,)


def awaitable() -> Awaitable[tuple[int, ...]]:
    return coroutine()


def coroutine_object() -> Coroutine[Any, Any, tuple[int, ...]]:
    return coroutine()


def half_known(n: OnlyForTypeCheckers) -> tuple[int, ...]:
    return (1,)


def decorate(fn: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


def bare_decorate(fn: Callable[..., T]) -> Callable[..., T]:
    def wrapper(*args):  # type: ignore[no-untyped-def]
        return fn(*args)

    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    return wrapper


class Service:
    n: int

    def method(self) -> tuple[int, ...]:
        return (1,)

    @classmethod
    def of_class(cls) -> tuple[int, ...]:
        return (1,)

    @staticmethod
    def static() -> tuple[int, ...]:
        return (1,)

    def __call__(self) -> tuple[int, ...]:
        return (1,)


class SlottedService:
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> tuple[int, ...]:
        return (1,)


@pytest.mark.parametrize(
    "fn",
    [
        annotated,
        coroutine,
        awaitable,
        coroutine_object,
        half_known,
        functools.partial(annotated, 1),
        functools.partial(functools.partial(Service().method)),
        Service().method,
        Service.of_class,
        Service.static,
        Service(),
        SlottedService(),
        functools.partial(Service()),
        decorate(annotated),
        decorate(decorate(coroutine)),
        bare_decorate(annotated),
        functools.cache(annotated),
    ],
)
def test_the_annotation_is_found_through(fn: Callable[..., object]) -> None:
    assert codec_for(fn).round_trip((1, 2), "s") == ("[1,2]", (1, 2))


def test_a_class_is_the_type_of_what_it_returns() -> None:
    assert codec_for(Line).round_trip(line := Line(sku="x", price=Decimal("1.0")), "s")[1] == line
    assert codec_for(int).round_trip(5, "s")[1] == 5


def test_a_class_whose_metaclass_is_callable_is_its_type_as_well() -> None:
    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            return super().__call__(*args)

    @dataclass
    class Made(metaclass=Meta):
        n: int

    assert codec_for(Made).round_trip(Made(1), "s")[1] == Made(1)


def test_a_builtin_without_an_annotation_returns_json() -> None:
    assert codec_for(len).round_trip(5, "s") == ("5", 5)


def test_an_annotation_may_name_a_class_of_the_enclosing_function() -> None:
    class Local(BaseModel):
        n: int

    def step() -> list[Local]:
        return [Local(n=1)]

    assert codec_for(step).round_trip(step(), "s")[1] == [Local(n=1)]


def test_a_variable_of_the_enclosing_function_may_be_assigned_later() -> None:
    def step() -> int:
        return later

    codec = codec_for(step)
    later = 1
    assert codec.round_trip(step(), "s") == ("1", 1)


def test_an_annotation_is_resolved_where_the_decorated_function_is_not_its_decorator() -> None:
    elsewhere: dict[str, Any] = {"functools": functools}
    exec("def passing(fn): return functools.wraps(fn)(lambda *args: fn(*args))", elsewhere)
    decorated = elsewhere["passing"](lines)
    assert codec_for(decorated).round_trip(decorated(), "s")[1] == lines()


def test_an_annotation_known_to_type_checkers_only_is_named_with_the_remedy() -> None:
    def step() -> OnlyForTypeCheckers: ...  # type: ignore[empty-body]

    with pytest.raises(UsageError) as caught:
        codec_for(step)
    for part in (__name__, "step", "OnlyForTypeCheckers", "TYPE_CHECKING", "import"):
        assert part in str(caught.value)


@pytest.mark.parametrize("annotation", [Opaque, list[Opaque], Iterator[int]])
def test_an_annotation_that_pydantic_does_not_know_is_named_with_the_remedy(annotation: Any) -> None:
    with pytest.raises(UsageError, match=r"step: pydantic has no schema .* use a pydantic model"):
        returning(annotation)


def test_no_annotation_is_refused_with_the_remedy_to_annotate() -> None:
    with pytest.raises(ResultError, match=rf"tuple.*{EXACTLY} \(now: Any\)"):
        unannotated().round_trip((1,), "s")


def test_a_codec_is_shared_by_functions_of_one_annotation_and_made_once() -> None:
    def make() -> Callable[..., object]:
        def step() -> list[int]: ...  # type: ignore[empty-body]

        return step

    assert codec_for(annotated) is codec_for(annotated)
    assert codec_for(make()) is codec_for(make())


@pytest.mark.parametrize("fn", [annotated, Service().method, Service(), functools.partial(annotated, 1)])
def test_an_annotation_is_resolved_once(fn: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_for(fn)
    monkeypatch.setattr("sqla_durable.codec._build", None)
    assert codec_for(fn) is codec


def test_unions_in_another_order_do_not_share_a_codec() -> None:
    assert returning(int | str) is not returning(str | int)


def test_a_function_is_not_kept_alive() -> None:
    def step() -> int: ...  # type: ignore[empty-body]

    codec_for(step)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("annotation", "value", "microseconds"),
    [(None, None, 60), (int, 5, 60), (str, "hello", 60), (Base, Base(a=1), 250)],
)
def test_a_small_result_costs_microseconds(annotation: Any, value: Any, microseconds: float) -> None:
    codec = returning(annotation)
    best = min(_seconds(lambda: codec.round_trip(value, "s")) for _ in range(20))
    assert best * 1e6 < microseconds, "ten times the budget: room for a slow machine"


def test_ten_thousand_ints_cost_milliseconds() -> None:
    codec = returning(list[int])
    assert min(_seconds(lambda: codec.round_trip(list(range(10_000)), "s"), 1) for _ in range(5)) < 0.1


def _seconds(call: Callable[[], object], times: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
