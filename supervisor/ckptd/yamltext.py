"""What does a YAML text say, word for word, and on which line does each key stand?

YAML 1.1 guesses what a bare word means: `no` is false, `010` is eight, `12:30` is 750, `1e-4` is text, `2024-01-01` is
a date, and the second of two equal keys wins. Here nothing is guessed: a scalar stays the text that was written, as
`Plain` when it stood without quotes, and the schema, which knows what a key wants, reads it. Only `null`, `~` and
nothing at all become None. Variables are not expanded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

MAX_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 20_000
"""Values after aliases are followed: ten aliases in ten levels of lists would be ten thousand million."""

Key = tuple[str | int, ...]

_PLAIN: Final = "ckptd:plain"
_STR: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"
_MAP: Final = "tag:yaml.org,2002:map"
_SEQ: Final = "tag:yaml.org,2002:seq"
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})


class Plain(str):
    """A scalar that stood without quotes: its text may be meant as a number, a truth value or a word."""

    __slots__ = ()


@dataclass(frozen=True)
class Problem:
    """Something wrong with the text. `line` counts from 1."""

    line: int
    key: Key
    message: str


@dataclass(frozen=True)
class Document:
    """A mapping of str to nested dict, list, str, `Plain` and None, and the line of every key and list item in it."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, key: Key) -> int:
        """Line of a key, or of the nearest one around it that was written."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


class _TooMuch(Exception):
    """The text is nested or repeated beyond what a job file needs."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Composes nodes and leaves the meaning of scalars alone."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            if not implicit[0]:
                return _STR
            return _MERGE if value == "<<" else _PLAIN
        return _MAP if kind is yaml.MappingNode else _SEQ

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise _TooMuch(event.start_mark.line + 1, f"more than {MAX_DEPTH} levels of nesting")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


@dataclass
class _Reader:
    """Turns nodes into values, noting lines and problems on the way."""

    document: Document = field(default_factory=Document)
    values: int = 0

    def problem(self, node: yaml.Node, key: Key, message: str) -> None:
        self.document.problems.append(Problem(node.start_mark.line + 1, key, message))

    def value(self, node: yaml.Node, key: Key) -> Any:
        self.values += 1
        if self.values > MAX_VALUES or len(key) > MAX_DEPTH:
            raise _TooMuch(node.start_mark.line + 1, f"more than {MAX_VALUES} values once its aliases are followed")
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self.mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            items = []
            for i, item in enumerate(node.value):
                self.document.lines[(*key, i)] = item.start_mark.line + 1
                items.append(self.value(item, (*key, i)))
            return items
        if isinstance(node, yaml.ScalarNode) and node.tag in (_PLAIN, _STR, _MERGE):
            return self.scalar(node, key)
        self.problem(node, key, f"the tag {node.tag!r} is not understood; leave it out")
        return None

    def scalar(self, node: yaml.ScalarNode, key: Key) -> str | None:
        text = str(node.value)
        if "\0" in text or not _encodable(text):
            self.problem(node, key, f"{text[:40]!r} holds a character that no file name or argument can carry")
            return ""
        if node.tag == _STR:
            return text
        return None if text in _NULLS else Plain(text)

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for name_node, value_node in node.value:
            if name_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(name_node, yaml.ScalarNode):
                self.problem(name_node, key, "a list or a mapping cannot be a key")
                continue
            name = self.scalar(name_node, key) or ""
            where = (*key, str(name))
            if name in own:
                first = self.document.lines[where]
                self.problem(name_node, where, f"duplicate key; it is already on line {first}")
                continue
            self.document.lines[where] = name_node.start_mark.line + 1
            own[str(name)] = self.value(value_node, where)
        for other in merged:
            # A merged mapping yields to the keys written here and to those merged before it.
            if not isinstance(other, yaml.MappingNode):
                self.problem(other, key, "'<<' merges mappings, and this is none")
                continue
            taken = _Reader(dataclasses.replace(self.document, lines={}), self.values)
            for name, value in taken.mapping(other, key).items():
                if name not in own:
                    own[name] = value
                    below = {k: line for k, line in taken.document.lines.items() if k[: len(key) + 1] == (*key, name)}
                    self.document.lines.update(below)
            self.values = taken.values
        return own


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read(data: bytes) -> Document:
    """Read one YAML document whose top level is a mapping. Never raises: what is wrong is in `problems`."""
    if len(data) > MAX_BYTES:
        return _refused(1, f"the file is {len(data)} bytes long; a job file is smaller than {MAX_BYTES}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _refused(data.count(b"\n", 0, error.start) + 1, f"not UTF-8: byte {data[error.start]:#04x}")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _PLAIN and node.value in _NULLS):
            return _refused(1, "the file is empty; `ckptd init` writes one to start from")
        if not isinstance(node, yaml.MappingNode):
            return _refused(node.start_mark.line + 1, "the top level should be a mapping (`key: value`)")
        reader = _Reader()
        reader.document.values.update(reader.value(node, ()) or {})
        return reader.document
    except _TooMuch as error:
        return _refused(error.line, str(error))
    except yaml.MarkedYAMLError as error:
        return _refused(*_syntax(error))
    except yaml.reader.ReaderError as error:
        at = error.position if isinstance(error.position, int) else 0
        return _refused(text.count("\n", 0, at) + 1, f"the character {chr(int(error.character))!r} is not allowed")
    except Exception as error:  # PyYAML lets ValueError and its like escape from odd escapes and directives
        return _refused(1, f"cannot be read as YAML: {str(error)[:200]}")


def _refused(line: int, message: str) -> Document:
    return Document(problems=[Problem(line, (), message)])


def _syntax(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Line and message of a syntax error."""
    mark: Any = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    problem = error.problem or error.context or "cannot be read as YAML"
    if "'\\t'" in problem:
        return line, "a tab stands here; YAML indents with spaces only"
    if "expected a single document" in (error.context or ""):
        return line, "a second document begins here ('---'); a job file holds one"
    column = f", column {mark.column + 1}" if mark is not None else ""
    context = f" ({error.context})" if error.context and error.context != problem else ""
    return line, f"not YAML{column}: {problem}{context}"
