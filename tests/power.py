"""What may be left on a disk when the power goes: a simulator over a recording of calls.

A file system keeps a promise only for what was flushed. At the moment of the loss every
effect of an earlier call may be on the disk or not, one by one, unless a flush of *that*
file or *that* folder began after the effect and ended before the loss. A file's bytes
and its name are different effects, covered by different flushes; a rename is one effect.
Real file systems lose less than this. What survives here survives anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiockpt.testing import FileOp

PAGE = 4096


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever its names are."""

    is_folder: bool
    data: bytes = b""
    """At the beginning of the recording."""
    names: dict[str, Node] = field(default_factory=dict)
    """At the beginning; the live ones while a recording is read."""


@dataclass(frozen=True, eq=False)
class Effect:
    """One change that a flush of `of` makes durable."""

    of: Node
    began: int
    ended: int
    name: str = ""
    """A name that appears in the folder `of`, with `node` under it; or goes, without."""
    node: Node | None = None
    was: str = ""
    """The name it had before, for a rename."""
    offset: int = 0
    data: bytes | None = None
    """Bytes written into the file `of`."""
    length: int | None = None
    """The file's new length."""


@dataclass(frozen=True)
class Flush:
    """A flush of a file or folder."""

    of: Node
    began: int
    ended: int


def read_tree(folder: Path) -> Node:
    """A real folder as it is now, all of it durable."""
    node = Node(True)
    for entry in sorted(folder.iterdir()):
        node.names[entry.name] = read_tree(entry) if entry.is_dir() else Node(False, entry.read_bytes())
    return node


def copy_names(node: Node) -> dict[Node, dict[str, Node]]:
    """The names in every folder at or below the node."""
    found = {node: dict(node.names)}
    for child in node.names.values():
        if child.is_folder:
            found |= copy_names(child)
    return found


class Recording:
    """The effects and flushes of a recording, from a tree as it was before.

    Args:
        base: the folder the tree stands for.
        tree: what was in it.
        log: every call to the disk since then.
    """

    def __init__(self, base: Path, tree: Node, log: Sequence[FileOp]) -> None:
        self.base = base
        self.root = tree
        self.start = copy_names(tree)
        self.effects: list[Effect] = []
        self.flushes: list[Flush] = []
        self.end = max(event.ended or event.began for event in log)
        self._files: dict[int, Node] = {}
        self._live = {folder: dict(names) for folder, names in self.start.items()}
        for event in sorted(log, key=lambda e: e.began):
            if event.ended is not None:
                self._read(event, event.ended)

    def _place(self, path: str) -> tuple[Node, str]:
        """The folder a path is in, and the last name."""
        *above, name = Path(path).relative_to(self.base).parts or ("",)
        node = self.root
        for part in above:
            node = self._live[node][part]
        return node, name

    def _node(self, path: str) -> Node:
        folder, name = self._place(path)
        return self._live[folder][name] if name else folder

    def _read(self, event: FileOp, ended: int) -> None:
        op, path = event.op, event.path
        if op in ("sync_dir", "fsync"):
            if op == "sync_dir" and not Path(path).is_relative_to(self.base):
                return
            of = self._node(path) if op == "sync_dir" else self._files[event.file or 0]
            self.flushes.append(Flush(of, event.began, ended))
        elif op in ("mkdir", "create", "lock"):
            self._make(event, ended)
        elif op in ("rename", "replace", "link"):
            self._name(event, ended)
        elif op in ("unlink", "rmdir"):
            folder, name = self._place(path)
            self._live[folder].pop(name, None)
            self.effects.append(Effect(folder, event.began, ended, name=name))
        elif op in ("write", "truncate"):
            self._change(event, ended)

    def _make(self, event: FileOp, ended: int) -> None:
        folder, name = self._place(event.path)
        if event.op == "lock" and name in self._live[folder]:
            return
        node = Node(event.op == "mkdir")
        if node.is_folder:
            self._live[node], self.start[node] = {}, {}
        if event.file is not None:
            self._files[event.file] = node
        self._live[folder][name] = node
        self.effects.append(Effect(folder, event.began, ended, name=name, node=node))

    def _name(self, event: FileOp, ended: int) -> None:
        folder, name = self._place(event.path)
        target, new = self._place(event.target or "")
        assert folder is target, "names are only moved within a folder: it is one effect then"
        node = self._live[folder][name]
        was = "" if event.op == "link" else name
        if was:
            del self._live[folder][was]
        self._live[folder][new] = node
        self.effects.append(Effect(folder, event.began, ended, name=new, node=node, was=was))

    def _change(self, event: FileOp, ended: int) -> None:
        node = self._files[event.file or 0]
        if event.op == "truncate":
            self.effects.append(Effect(node, event.began, ended, length=event.nbytes))
            return
        assert event.data is not None, "the recording has to keep the data"
        # The first page may be there without the rest, and the other way round.
        for at, part in ((0, event.data[:PAGE]), (PAGE, event.data[PAGE:])):
            if part:
                self.effects.append(Effect(node, event.began, ended, offset=event.offset + at, data=part))

    def without(self, flush: Flush) -> Recording:
        """The same recording of a program that forgot one flush."""
        other = object.__new__(Recording)
        other.__dict__ |= self.__dict__ | {"flushes": [f for f in self.flushes if f is not flush]}
        return other

    def at(self, time: int) -> tuple[list[Effect], list[Effect]]:
        """(what is certainly on the disk at a time, what may or may not be)."""
        kept: list[Effect] = []
        open_: list[Effect] = []
        for effect in self.effects:
            if effect.began > time:
                continue
            safe = any(f.ended <= time and _covers(f, effect) for f in self.flushes)
            (kept if safe else open_).append(effect)
        return kept, open_

    def tree(self, effects: Iterable[Effect]) -> dict[str, bytes | None]:
        """Every path with just these effects, in their order; None for a folder."""
        chosen = set(map(id, effects))
        names = {folder: dict(found) for folder, found in self.start.items()}
        data: dict[Node, bytearray] = {}
        for effect in self.effects:
            if id(effect) in chosen:
                _apply(effect, names, data)
        found: dict[str, bytes | None] = {}
        _walk(self.root, "", names, data, found)
        return found


def _covers(flush: Flush, effect: Effect) -> bool:
    if flush.of is not effect.of:
        return False
    # Calls on one file come one after the other, but the log has what one call did as begun at once.
    return flush.began > (effect.ended if effect.of.is_folder else effect.began)


def _apply(effect: Effect, names: dict[Node, dict[str, Node]], data: dict[Node, bytearray]) -> None:
    if effect.of.is_folder:
        folder = names[effect.of]
        folder.pop(effect.was or effect.name, None)
        if effect.node is not None:
            folder[effect.name] = effect.node
        return
    content = data.setdefault(effect.of, bytearray(effect.of.data))
    if effect.data is not None:
        end = effect.offset + len(effect.data)
        content.extend(bytes(max(0, end - len(content))))
        content[effect.offset : end] = effect.data
    elif effect.length is not None:
        content.extend(bytes(max(0, effect.length - len(content))))
        del content[effect.length :]


def _walk(
    node: Node,
    path: str,
    names: dict[Node, dict[str, Node]],
    data: dict[Node, bytearray],
    found: dict[str, bytes | None],
) -> None:
    for name, child in sorted(names[node].items()):
        if child.is_folder:
            found[f"{path}{name}"] = None
            _walk(child, f"{path}{name}/", names, data, found)
        else:
            found[f"{path}{name}"] = bytes(data.get(child, child.data))


def fingerprint(tree: dict[str, bytes | None]) -> str:
    """Equal trees have equal ones."""
    sha = hashlib.sha256()
    for path, content in tree.items():
        sha.update(path.encode())
        sha.update(b"/" if content is None else b"=" + hashlib.sha256(content).digest())
    return sha.hexdigest()


def write_tree(tree: dict[str, bytes | None], folder: Path) -> None:
    """Put a tree on a real disk."""
    folder.mkdir()
    for path, content in tree.items():
        place = os.path.join(folder, path)
        if content is None:
            os.mkdir(place)
        else:
            with open(place, "wb") as file:
                file.write(content)


def subsets(effects: Sequence[Effect], exhaustive: int) -> Iterator[tuple[Effect, ...]]:
    """All subsets of a few effects; of many: none, all, each alone, all but each, each prefix."""
    if len(effects) <= exhaustive:
        for size in range(len(effects) + 1):
            yield from itertools.combinations(effects, size)
        return
    for at in range(len(effects) + 1):
        yield tuple(effects[:at])
    for effect in effects:
        yield (effect,)
        yield tuple(other for other in effects if other is not effect)
