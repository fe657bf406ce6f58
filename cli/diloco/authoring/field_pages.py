"""``diloco explain``: what a field of the job file takes and means, from the models that check the file."""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from diloco.console import TEXT_WIDTH, CommandError, wrapped
from diloco_protocol.spec.base import Spec, fields_by_alias, nested_model
from diloco_protocol.spec.explain import meant_field, words
from diloco_protocol.spec.job import IMMUTABLE, DiLoCoJob
from diloco_protocol.spec.other_names import OTHERS, SAMPLES, meant_by, other_names, plain_name
from diloco_protocol.spec.rules import RULES

_INDEX = re.compile(r"\[\d*\]$")


@dataclass(frozen=True, slots=True)
class FieldPage:
    """One field: its path (without indices), the model's field (None: the job itself), what lies in it."""

    path: tuple[str, ...]
    field: FieldInfo | None
    inner: type[Spec] | None
    many: bool = False

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def takes(self) -> str:
        return "a mapping" if self.field is None else words(self.field.annotation, self.field.metadata)

    @property
    def required(self) -> bool:
        return self.field is None or self.field.is_required()

    @property
    def description(self) -> str:
        said = inspect.getdoc(DiLoCoJob) if self.field is None else self.field.description
        return " ".join((said or "").split())

    @property
    def override(self) -> str | None:
        """The path that ``--set`` takes for it; None: it lies outside of ``spec``."""
        if self.path[:1] != ("spec",) or len(self.path) < 2:
            return None
        return ".".join("regions.0" if step == "regions" else step for step in self.path[1:])

    @property
    def default(self) -> Any:
        """The default as the file would say it; a section's own are its fields'."""
        if self.field is None or self.field.is_required():
            return None
        value = self.field.get_default(call_default_factory=True, validated_data={})
        return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Spec) else value

    @property
    def fixed(self) -> bool:
        """Whether it may not change once the job has started."""
        below = self.path[1:]
        return any(below[: len(path)] == path for path in IMMUTABLE)

    def fields(self) -> list[FieldPage]:
        """The fields in it, in the models' order."""
        if self.inner is None:
            return []
        found = []
        for alias, field in fields_by_alias(self.inner).items():
            inner, many = nested_model(field.annotation)
            found.append(FieldPage((*self.path, alias), field, inner, many))
        return found

    def example(self) -> Any:
        """A value that it takes, other than null."""
        if self.field is not None and self.field.examples:
            return self.field.examples[0]
        if self.inner is not None and (sample := SAMPLES.get(self.name)):
            name = next(iter(sample))
            return {name: sample[name]}
        if self.default not in (None, [], {}):
            return self.default
        return SAMPLES.get(".".join(self.path[:-1]), {}).get(self.path[-1]) if self.path else None

    def rules(self) -> list[str]:
        """The sentences about other fields in which this one is named."""
        below = ".".join(self.path[1:])
        if not below or self.inner is not None:
            return []
        forms = {below, ".".join(below.split(".")[-2:])} - {self.path[-1]}
        named = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(forms))) + r")(?![\w])") if forms else None
        docs = (" ".join((inspect.getdoc(rule) or "").split()) for rule in RULES)
        sentences = (sentence for doc in docs for sentence in re.split(r"(?<=\.) (?=[A-Za-z])", doc))
        return [sentence for sentence in sentences if named is not None and named.search(sentence)]


ROOT_PAGE = FieldPage((), None, DiLoCoJob)


def walk(page: FieldPage = ROOT_PAGE) -> Iterator[FieldPage]:
    """Every field below one, a section before what is in it."""
    for inner in page.fields():
        yield inner
        yield from walk(inner)


def find_field(name: str | None) -> FieldPage:
    """The field that is called ``name``: its path, from ``spec`` or from below it, with or without indices; or its
    name alone, or what the paper or other programs call it, where only one field can be meant. Raises CommandError."""
    written = [_INDEX.sub("", step) for step in (name or "").strip().split(".")]
    steps = tuple(step for step in written if step and not step.isdigit())
    if not steps:
        return ROOT_PAGE
    pages = {page.path: page for page in walk()}
    for path in (steps, ("spec", *steps)):
        if path in pages:
            return pages[path]
    plain = plain_name(steps[-1])
    sections = (steps[:-1], ("spec", *steps[:-1])) if len(steps) > 1 else ((),)
    same = [
        page
        for page in pages.values()
        if (plain_name(page.path[-1]) == plain or plain in map(plain_name, other_names(page.path)))
        and any(page.path[: len(section)] == section for section in sections)
    ]
    if len(same) == 1:
        return same[0]
    for path in (steps, ("spec", *steps)) if len(steps) > 1 else ():
        meant = meant_field(DiLoCoJob, path)
        if meant is not None and meant[:-1] == path[:-1] and meant_by(steps[-1], path[:-1]) is not None:
            return pages[tuple(map(str, meant))]
    raise CommandError(f"{name} is no field of a job: {_hint(steps, list(pages.values()), same)}")


def _hint(steps: tuple[str, ...], pages: list[FieldPage], same: list[FieldPage]) -> str:
    """What may have been meant instead."""
    if same:
        return f"did you mean {' or '.join(page.name for page in same)}?"
    sections = {page.path: page for page in pages}
    for length in range(len(steps), 0, -1):
        for head in (steps[:length], ("spec", *steps[:length])):
            found = sections.get(head)
            if found is not None and found.inner is None:
                return f"{found.name} is {found.takes}, without fields that the job file would know"
    dotted = {plain_name(page.name.removeprefix("spec.")): page.name for page in pages}
    written = plain_name(".".join(steps).removeprefix("spec."))
    near = difflib.get_close_matches(written, dotted, n=1, cutoff=0.75)
    if near and len(steps) > 1:
        return f"did you mean {dotted[near[0]]}?"
    last = plain_name(steps[-1])
    other = [path for path, names in OTHERS.items() if last in map(plain_name, names.split())]
    if other:
        return f"did you mean {' or '.join(other)}?"
    names = {plain_name(page.path[-1]): page.name for page in pages}
    meant = difflib.get_close_matches(last, names, n=1, cutoff=0.7)
    if meant:
        return f"did you mean {names[meant[0]]}?"
    return "`diloco explain` shows the sections, `diloco explain spec` what is in a job"


def page_json(page: FieldPage, recursive: bool = False) -> dict[str, Any]:
    """A field's page, for programs."""
    document: dict[str, Any] = {
        "path": page.name,
        "takes": page.takes,
        "required": page.required,
        "default": page.default,
        "description": page.description,
        "example": page.example(),
        "fixedOnceStarted": page.fixed,
        "otherNames": other_names(page.path),
    }
    if page.inner is not None:
        document["fields"] = [
            page_json(one, True)
            if recursive
            else {"path": one.name, "takes": one.takes, "default": one.default, "description": one.description}
            for one in page.fields()
        ]
    return document


def page_text(page: FieldPage, recursive: bool = False, width: int | None = None) -> str:
    """A field's page, for people."""
    width = max(40, width or min(shutil.get_terminal_size().columns, TEXT_WIDTH))
    title = page.name + ("[]" if page.many else "") or "A job"
    lines = [title, *wrapped(page.description, "  ", width=width), ""]
    if page.field is not None:
        facts = [("takes", page.takes)]
        if page.required or page.inner is None or page.default != {}:
            facts.append(("default", "none: it is required" if page.required else _default(page)))
        example = page.example()
        if example is not None:
            facts.append(("example", f"{page.path[-1]}: {yaml_line(example)}"))
        if page.inner is None and page.override is not None and isinstance(example, (str, int, float)):
            facts.append(("one run", f"--set {page.override}={yaml_line(example)}"))
        if other := other_names(page.path):
            facts.append(("also called", ", ".join(other[:6])))
        if page.fixed:
            facts.append(("fixed", "once the job has started"))
        facts += [("rule", rule) for rule in page.rules()]
        for name, said in facts:
            lines += wrapped(said, f"  {name:<12}", " " * 14, width)
    if page.inner is not None:
        lines += ["  fields", *_fields(page, recursive, width)]
        if not recursive:
            fields = page.fields()
            lines += [
                "",
                f"More of one: diloco explain {next((f for f in fields if f.inner is not None), fields[0]).name}",
            ]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip("\n")


def _fields(page: FieldPage, recursive: bool, width: int, depth: int = 2) -> list[str]:
    lines = []
    for one in page.fields():
        head = f"{'  ' * depth}{one.path[-1]}{'[]' if one.many else ''}"
        if one.inner is not None:
            tail = "required" if one.required else ""
        else:
            tail = "required" if one.required else f"default {_default(one)}"
        lines.append(f"{head:<{24 + 2 * depth}} {tail}".rstrip())
        if one.inner is not None and recursive:
            lines += _fields(one, True, width, depth + 1)
        elif not recursive:
            said = one.field.description or "" if one.field is not None else ""
            lines += wrapped(said, "  " * (depth + 2), width=width)
    return lines


def _default(page: FieldPage) -> str:
    if page.inner is not None and not page.many and not page.default:
        return "null: there is none" if page.default is None else "its fields'"
    return yaml_line(page.default)


def yaml_line(value: Any) -> str:
    """A value as one line of YAML."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10_000).strip()[1:-1]
