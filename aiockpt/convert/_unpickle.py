"""A pickle machine that knows data and nothing else: it reads, it never runs.

Python's own `Unpickler` calls what a file names, looks classes up by import and lets a
file set attributes on what it found. This machine has a table of the names a format
needs; each stands for a small function of our own that makes inert values. Any other name
ends the reading, with that name in the error, before anything was made of it.

Sizes are bounded by the pickle's own size: every instruction makes at most one object,
copies are counted, and what is shared over and over is found by `_census`.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from ..errors import CheckpointError, ForeignFormatError, UnsafeFileError
from ._census import ALWAYS, PER_BYTE, check_key

__all__ = ["LIMIT", "Global", "Record", "Table", "unpickle"]

LIMIT: Final = 256 << 20
"""Bytes of one pickle at the most."""
_MARK: Final = object()


class Input(Protocol):
    """What a pickle is read from."""

    def read(self, n: int, /) -> bytes: ...
    def readline(self) -> bytes: ...
    def tell(self) -> int: ...


class Global:
    """What a name in a pickle stands for.

    Args:
        name: the name, for messages.
        make: called with the arguments of a REDUCE; None: the value stands for itself.
        value: what a bare mention means, such as a dtype.
    """

    __slots__ = ("make", "name", "value")

    def __init__(self, name: str, make: Callable[..., Any] | None = None, value: Any = None) -> None:
        self.name = name
        self.make = make
        self.value = value


class Record:
    """An object of a class that is never looked up: its name, arguments and state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def field(self, name: str, default: Any = None) -> Any:
        """An attribute of the object, as the pickle states it."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


Table = Callable[[str, str], Global | None]
"""(module, name) to what it stands for; None refuses it."""


def unpickle(
    data: bytes | Input,
    table: Table,
    *,
    file: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read one pickle.

    Args:
        data: the pickle, or a source that is left behind its last byte.
        table: the names it may use.
        file: for messages.
        persistent: what a persistent id stands for; None: there are none.

    Raises:
        UnsafeFileError: it uses another name, or an instruction that data never needs.
        ForeignFormatError: it is no pickle, or a damaged one.
    """
    machine = _Machine(table, file, persistent)
    try:
        return machine.run(pickletools.genops(data))  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except RecursionError as error:
        raise ForeignFormatError(f"{file}: the pickle is nested too deeply", file=file) from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = f"{file}: not a pickle that can be read: {type(error).__name__}: {str(error)[:200]}"
        raise ForeignFormatError(why, file=file) from error


class _Machine:
    """Stack and memo of one pickle."""

    def __init__(self, table: Table, file: str, persistent: Callable[[Any], Any] | None) -> None:
        self.table = table
        self.file = file
        self.persistent = persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.work = 0
        self.at = 0

    def run(self, ops: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Any:
        """Carry out the instructions up to STOP."""
        for op, arg, at in ops:
            self.at = at or 0
            if op.name in _LITERALS:
                self.stack.append(arg)
                continue
            step = _STEPS.get(op.name)
            if step is None:
                raise self.unsafe(f"the pickle uses the instruction {op.name}, which plain data never needs")
            step(self, arg)
        return self.settled(self.stack.pop())

    def unsafe(self, why: str) -> UnsafeFileError:
        """The error of a pickle that wants more than data."""
        return UnsafeFileError(f"{self.file}: {why}; nothing of it was run", file=self.file)

    def spend(self, count: int) -> None:
        """Count copied elements, so that a small pickle cannot become a large state."""
        self.work += count
        if self.work > ALWAYS + PER_BYTE * self.at:
            raise ForeignFormatError(
                f"{self.file}: the pickle unfolds to far more than it holds", file=self.file
            )

    def settled(self, value: Any) -> Any:
        """A value that goes into a container: names are turned into what they stand for."""
        if isinstance(value, Global):
            if value.make is not None and value.value is None:
                raise self.unsafe(f"the pickle stores {value.name} itself, which is no value")
            return value.value
        if value is _MARK:
            raise ValueError("a mark is no value")
        return value

    def pop(self) -> Any:
        return self.settled(self.stack.pop())

    def popped_mark(self) -> list[Any]:
        """What lies above the last mark."""
        values: list[Any] = []
        while (top := self.stack.pop()) is not _MARK:
            values.append(self.settled(top))
        values.reverse()
        return values


def _find(m: _Machine, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name is no text")
    found = m.table(module, name)
    if found is None:
        raise m.unsafe(f"the pickle names {module[:80]}.{name[:80]}, which is no plain data")
    m.stack.append(found)


def _global(m: _Machine, arg: str) -> None:
    _find(m, *arg.split(" ", 1))


def _stack_global(m: _Machine, _: Any) -> None:
    name, module = m.pop(), m.pop()
    _find(m, module, name)


def _call(m: _Machine, _: Any) -> None:
    args, target = m.pop(), m.stack.pop()
    if not isinstance(target, Global) or target.make is None or type(args) is not tuple:
        raise m.unsafe("the pickle calls something that is no name")
    m.spend(sum(len(arg) for arg in args if isinstance(arg, (list, tuple, str, bytes, dict))))
    m.stack.append(target.make(*args))


def _build(m: _Machine, _: Any) -> None:
    state, target = m.pop(), m.stack[-1]
    if isinstance(target, Record):
        target.state = state
    elif type(target) is OrderedDict and type(state) is dict and set(state) <= {"_metadata"}:
        vars(target).update(state)  # what a module's state dict carries: versions of its parts
    else:
        raise m.unsafe("the pickle sets attributes of a plain value")


def _drop(m: _Machine, _: Any) -> None:
    m.stack.pop()


def _drop_all(m: _Machine, _: Any) -> None:
    m.popped_mark()


def _put(m: _Machine, number: int) -> None:
    m.memo[int(number)] = m.stack[-1]


def _set_items(m: _Machine, flat: list[Any]) -> None:
    target = m.stack[-1]
    if not isinstance(target, dict) or len(flat) % 2:
        raise TypeError("items of no dict")
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        check_key(key)
        target[key] = value


def _append(m: _Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise TypeError("members of no list")
    target.extend(values)


def _add(m: _Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not set:
        raise TypeError("members of no set")
    for value in values:
        check_key(value)
    target.update(values)


def _frozen(m: _Machine, _: Any) -> None:
    values = m.popped_mark()
    for value in values:
        check_key(value)
    m.stack.append(frozenset(values))


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def step(m: _Machine, _: Any) -> None:
        values = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(values)))

    return step


def _dict_of(m: _Machine, _: Any) -> None:
    flat = m.popped_mark()
    m.stack.append({})
    _set_items(m, flat)


def _persistent(m: _Machine, _: Any) -> None:
    if m.persistent is None:
        raise m.unsafe("the pickle refers to something outside of it")
    m.stack.append(m.persistent(m.pop()))


def _key_value(m: _Machine, _: Any) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m, [key, value])


def _one_more(m: _Machine, _: Any) -> None:
    value = m.pop()
    _append(m, [value])


_LITERALS: Final = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
_STEPS: Final[Mapping[str, Callable[[_Machine, Any], None]]] = {
    "PROTO": lambda m, arg: None,
    "FRAME": lambda m, arg: None,
    "STOP": lambda m, arg: None,
    "MARK": lambda m, arg: m.stack.append(_MARK),
    "POP": _drop,
    "POP_MARK": _drop_all,
    "DUP": lambda m, arg: m.stack.append(m.stack[-1]),
    "NONE": lambda m, arg: m.stack.append(None),
    "NEWTRUE": lambda m, arg: m.stack.append(True),
    "NEWFALSE": lambda m, arg: m.stack.append(False),
    "EMPTY_TUPLE": lambda m, arg: m.stack.append(()),
    "TUPLE": lambda m, arg: m.stack.append(tuple(m.popped_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "EMPTY_LIST": lambda m, arg: m.stack.append([]),
    "LIST": lambda m, arg: m.stack.append(m.popped_mark()),
    "APPEND": _one_more,
    "APPENDS": lambda m, arg: _append(m, m.popped_mark()),
    "EMPTY_DICT": lambda m, arg: m.stack.append({}),
    "DICT": _dict_of,
    "SETITEM": _key_value,
    "SETITEMS": lambda m, arg: _set_items(m, m.popped_mark()),
    "EMPTY_SET": lambda m, arg: m.stack.append(set()),
    "ADDITEMS": lambda m, arg: _add(m, m.popped_mark()),
    "FROZENSET": _frozen,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": lambda m, arg: _put(m, len(m.memo)),
    "GET": lambda m, arg: m.stack.append(m.memo[int(arg)]),
    "BINGET": lambda m, arg: m.stack.append(m.memo[arg]),
    "LONG_BINGET": lambda m, arg: m.stack.append(m.memo[arg]),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "BINPERSID": _persistent,
}
