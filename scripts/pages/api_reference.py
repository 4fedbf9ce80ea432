"""The Python reference: every public name with its signature, its docstring, and each of its parameters."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module, util
from types import ModuleType
from typing import Any

import msgspec
from docstring_parser import Docstring, DocstringStyle, parse

from scripts.pages.markdown import fenced, table

# Users get these from qfleet, and do not make them.
MADE_BY_QFLEET = {"Policy", "QNet", "RunView"}
# The methods that users call, of classes with others for qfleet itself.
FOR_USERS = {"Policy": ("load", "predict", "raw_action", "save", "seed", "values")}

# Page, and the module whose public names it explains; one that does not exist has no page.
MODULES = {
    "reference/qfleet.md": "qfleet",
    "reference/custom.md": "qfleet.custom",
    "reference/testing.md": "qfleet.testing.toys",
}
LINE_CHARS = 88


@dataclass(frozen=True)
class Parameter:
    """A parameter as it is written in the source."""

    name: str  # with its stars
    kind: str
    default: str

    @property
    def key(self) -> str:
        """Its name in a docstring."""
        return self.name.lstrip("*")

    @property
    def text(self) -> str:
        """As in a signature."""
        typed = f"{self.name}: {self.kind}" if self.kind else self.name
        equals = " = " if self.kind else "="
        return f"{typed}{equals}{self.default}" if self.default else typed


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: `__all__`, or the classes and functions that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in own if not name.startswith("_")]


def pages() -> dict[str, str]:
    """Every page of this reference."""
    return {page: module_page(name) for page, name in MODULES.items() if util.find_spec(name) is not None}


def module_page(name: str) -> str:
    """All public names of a module."""
    module = import_module(name)
    heading = f"# {name.removesuffix('.toys')}\n\n{inspect.getdoc(module) or ''}\n\n"
    return heading + "\n".join(entry(each, getattr(module, each), 2) for each in public_names(module))


def entry(name: str, value: Any, level: int) -> str:
    """One name: function, method, class or constant."""
    heading = f"{'#' * level} {name}\n\n"
    if isinstance(value, type):
        return heading + class_text(name, value, level)
    if isinstance(value, property):
        return (
            heading + fenced(f"{name} -> {returned(value.fget)}", "python") + "\n" + description(docs_of(value)) + "\n"
        )
    if inspect.isroutine(value) or isinstance(value, classmethod | staticmethod):
        return heading + function_text(name, getattr(value, "__func__", value))
    return heading + fenced(f"{name} = {value!r}", "python")


def class_text(name: str, kind: type, level: int) -> str:
    """A class: what it is, its fields, its public methods and properties."""
    docs = docs_of(kind)
    explained = {each.arg_name: each.description or "" for each in docs.params}
    rows = [(f"`{field}`", f"`{hint}`" if hint else "", explained.get(field, "")) for field, hint in field_hints(kind)]
    made = constructor(kind)
    parts = [fenced(signature(name, made), "python")] if made is not None else []
    parts += [description(docs)]
    if rows:
        parts += [table(("field", "type", "meaning"), rows)]
    elif made is not None:
        parts += [parameter_table(made, explained)]
    parts += [entry(f"{name}.{method}", value, level + 1) for method, value in methods(kind)]
    return "\n".join(parts)


def function_text(name: str, function: Any) -> str:
    """A function or method: its signature, what it does, its parameters, what it returns and raises."""
    docs = docs_of(function)
    explained = {each.arg_name: each.description or "" for each in docs.params}
    parts = [fenced(signature(name, function), "python"), description(docs), parameter_table(function, explained)]
    if docs.returns is not None and docs.returns.description:
        parts.append(f"**Returns** {docs.returns.description}\n")
    parts += [f"**Raises** `{each.type_name}`: {each.description}\n" for each in docs.raises]
    return "\n".join(part for part in parts if part)


def parameter_table(function: Any, explained: dict[str, str]) -> str:
    """Parameters with type, default and meaning; without any meaning the signature says the same."""
    rows = [
        (f"`{each.name}`", f"`{each.kind}`" if each.kind else "", f"`{each.default}`" if each.default else "", text)
        for each in parameters(function)
        for text in [explained.get(each.key, "")]
    ]
    return table(("parameter", "type", "default", "meaning"), rows) if any(explained.values()) else ""


# --- what is in the source ---


def docs_of(value: Any) -> Docstring:
    """A docstring in its parts."""
    return parse(inspect.getdoc(value) or "", DocstringStyle.GOOGLE)


def description(docs: Docstring) -> str:
    """What a docstring says before its parts."""
    return "\n\n".join(filter(None, [docs.short_description, docs.long_description])) + "\n"


def definition(function: Any) -> ast.FunctionDef:
    """The source of a function; inspect would show types by the modules where they live."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def parameters(function: Any) -> list[Parameter]:
    """All parameters in their order, without `self` and `cls`."""
    given = definition(function).args
    plain = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    found = [_parameter(each, default) for each, default in zip(plain, defaults, strict=True)]
    found += [_parameter(given.vararg, None, "*")] if given.vararg else []
    found += [_parameter(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found += [_parameter(given.kwarg, None, "**")] if given.kwarg else []
    return [each for each in found if each.name not in ("self", "cls")]


def _parameter(argument: ast.arg, default: ast.expr | None, stars: str = "") -> Parameter:
    kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return Parameter(stars + argument.arg, kind, "" if default is None else ast.unparse(default))


def returned(function: Any) -> str:
    """The type that a function returns."""
    hint = definition(function).returns
    return "" if hint is None else ast.unparse(hint).strip("'\"")


def signature(name: str, function: Any) -> str:
    """As it is called: on one line if it fits."""
    texts = [each.text for each in parameters(function)]
    node = definition(function)
    if node.args.kwonlyargs and node.args.vararg is None:
        texts.insert(len(texts) - len(node.args.kwonlyargs) - bool(node.args.kwarg), "*")
    end = "" if node.name == "__init__" else f" -> {returned(function)}"
    line = f"{name}({', '.join(texts)}){end}"
    return line if len(line) <= LINE_CHARS else f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){end}"


def constructor(kind: type) -> Any:
    """The class's own `__init__`; that of a dataclass or plan follows from its fields, and a Protocol is not called."""
    called = not (is_dataclass(kind) or getattr(kind, "_is_protocol", False) or kind.__name__ in MADE_BY_QFLEET)
    return vars(kind).get("__init__") if called else None


def field_hints(kind: type) -> list[tuple[str, str]]:
    """Fields of a dataclass or named tuple with their types as written; those of a plan have a page of their own."""
    if issubclass(kind, msgspec.Struct) or not (is_dataclass(kind) or hasattr(kind, "_fields")):
        return []
    if kind.__name__ in MADE_BY_QFLEET:
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)).body
    hints = {
        node.target.id: ast.unparse(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "_fields", ()))
    return [(name, hints.get(name, "")) for name in names]


def methods(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties of the class itself; `__call__` is what a Protocol of a function asks for."""
    public = [name for name in vars(kind) if not name.startswith("_") or name == "__call__"]
    if kind.__name__ in FOR_USERS:
        public = [name for name in public if name in FOR_USERS[kind.__name__]]
    found = [(name, vars(kind)[name]) for name in public]
    kinds = (property, classmethod, staticmethod)
    return [(name, value) for name, value in found if inspect.isfunction(value) or isinstance(value, kinds)]


# --- what is missing ---


def undocumented(module: ModuleType, with_parameters: bool = True) -> Iterator[str]:
    """Public names and methods, and with_parameters also parameters and fields, that nothing explains."""
    for name in public_names(module):
        missing = _missing(f"{module.__name__}.{name}", getattr(module, name))
        yield from (each for each in missing if with_parameters or not each.endswith("=)"))


def _missing(name: str, value: Any) -> Iterator[str]:
    plain = getattr(value, "__func__", value)
    if not isinstance(plain, property | type) and not inspect.isroutine(plain):
        return
    docs = docs_of(plain)
    if not docs.short_description:
        yield name
    known = {each.arg_name for each in docs.params if each.description}
    if isinstance(plain, type):
        wanted = [field for field, _ in field_hints(plain)]
        made = constructor(plain)
        wanted += [each.key for each in parameters(made)] if made is not None else []
        for method, each in methods(plain):
            yield from _missing(f"{name}.{method}", each)
    else:
        wanted = [] if isinstance(plain, property) else [each.key for each in parameters(plain)]
    yield from (f"{name}({each}=)" for each in wanted if each not in known)
