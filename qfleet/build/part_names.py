"""What run.toml says of a part of the user's own: its name, its plain settings, and the hash of its source."""

import hashlib
import inspect
import os
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import nn

HASH_DIGITS = 16
MAX_SETTINGS_CHARS = 200
ADDRESS = re.compile(" at 0x[0-9a-f]+")
SENT_SOURCE = "__qfleet_source__"  # attribute: the process that found the source, and the source
PLAIN = (bool, int, float, str, type(None))
OF_OTHERS = ("builtins", "abc", "typing", "dataclasses", "torch", "gymnasium", "qfleet", "keras")


def part_name(value: Any) -> str:
    """`module:Class(setting=1) sha256:0123456789abcdef`: what a part is, and the hash of its source."""
    named = value.func if isinstance(value, partial) else value
    kind = named if inspect.isroutine(named) or isinstance(named, type) else type(named)
    source = source_of(kind)
    if isinstance(value, nn.Module):
        source += ADDRESS.sub("", repr(value))  # its layers
    name = f"{kind.__module__}:{kind.__qualname__}{settings_text(value)}"
    return f"{name} sha256:{hashlib.sha256(source.encode()).hexdigest()[:HASH_DIGITS]}"


def settings_text(value: Any) -> str:
    """The plain values that decide what a part does, in parentheses; empty if there are none."""
    text = ", ".join(shown_settings(value))
    return f"({text[:MAX_SETTINGS_CHARS]})" if text else ""


def shown_settings(value: Any) -> list[str]:
    """Arguments of a partial function, variables that a function has captured, or attributes of an object."""
    if isinstance(value, partial):
        return [repr(each) for each in (*(getattr(one, "id", one) for one in value.args), *value.keywords.items())]
    if isinstance(value, type | nn.Module):
        return []
    if inspect.isfunction(value):
        captured = inspect.getclosurevars(value).nonlocals
    elif is_dataclass(value):
        captured = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    else:
        captured = getattr(value, "__dict__", {})
    return [f"{name}={each!r}" for name, each in captured.items() if is_plain(each)]


def is_plain(value: Any) -> bool:
    """Is it a number, a text, or a tuple of these?"""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def source_of(kind: Any) -> str:
    """The source of a function or class. What a script or a notebook has sent here brings its source along."""
    number, text = getattr(kind, "__dict__", {}).get(SENT_SOURCE, (os.getpid(), ""))
    if number != os.getpid():
        return str(text)
    text = "\n".join(find_source(each) for each in own_classes(kind)) if isinstance(kind, type) else find_source(kind)
    if getattr(kind, "__module__", None) == "__main__":  # it is sent whole, and its source cannot be found there
        with suppress(AttributeError, TypeError):
            setattr(kind, SENT_SOURCE, (os.getpid(), text))
    return text


def own_classes(kind: type) -> list[type]:
    """The class and those of its base classes that the user wrote."""
    bases = [each for each in kind.__mro__[1:] if each.__module__.partition(".")[0] not in OF_OTHERS]
    return [kind, *bases]


def find_source(kind: Any) -> str:
    """The source of a function or class of this process; of a class in a notebook, the sources of its methods."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        pass
    if not isinstance(kind, type):
        code = getattr(kind, "__code__", None)
        return repr(kind) if code is None else code_text(code)
    methods = sorted((name, each) for name, each in vars(kind).items() if inspect.isfunction(each))
    return "\n".join(find_source(method) for _, method in methods)


def code_text(code: Any) -> str:
    """Compiled code as text, for a function without source; without addresses, which change with each start."""
    constants = [code_text(each) if inspect.iscode(each) else repr(each) for each in code.co_consts]
    return "\n".join([code.co_code.hex(), *code.co_names, *constants])
