"""Which error ended a program, by the text it left, and which errors are the same."""

from __future__ import annotations

import logging
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.common.logs import JsonLines, TextLines
from diloco_protocol.common.program_errors import (
    MAX_ERROR_CHARS,
    MAX_KINDS,
    SAME_ERRORS,
    RepeatedErrors,
    error_line,
    last_lines,
    normal_form,
)


def traced(raises: str) -> list[str]:
    """What the interpreter prints when this code is not handled."""
    try:
        exec(raises, {})
    except BaseException as error:
        return "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("it raised nothing")


def logged(formatter: logging.Formatter, level: int, message: str, error: Exception | None = None) -> list[str]:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("diloco_worker", level, "x.py", 1, message, None, info)
    return formatter.format(record).splitlines()


FORMATTERS = [TextLines(), JsonLines({"job": "tiny"})]


@pytest.mark.parametrize(
    ("raises", "error"),
    [
        ("lss", "NameError: name 'lss' is not defined"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise KeyError(7)", "KeyError: 7"),
        ("raise ValueError('a | b + c')", "ValueError: a | b + c"),
        ("raise RuntimeError('Error in loading:\\n\\tsize mismatch')", "RuntimeError: Error in loading:"),
        ("compile('f(', 'x.py', 'exec')", "SyntaxError: '(' was never closed"),
        ("try:\n  1 / 0\nexcept Exception as e:\n  raise OSError('no disk') from e", "OSError: no disk"),
        ("raise ExceptionGroup('many', [ValueError('one')])", "ExceptionGroup: many (1 sub-exception)"),
    ],
)
def test_the_error_is_that_of_the_last_traceback(raises: str, error: str) -> None:
    before = ["epoch 1", *traced("raise LookupError('handled')"), "loss 2.31"]
    after = ["wandb: run finished", "  see https://example.org/run"]
    assert error_line([*before, *traced(raises), *after]) == error


@pytest.mark.parametrize("formatter", FORMATTERS, ids=["text", "json"])
def test_what_was_logged_as_an_error_last_is_the_error(formatter: logging.Formatter) -> None:
    info = logged(formatter, logging.INFO, "slot 0 at step 12")
    said = logged(formatter, logging.ERROR, "the model's file is not there")
    assert error_line([*info, *said, *info]) == "the model's file is not there"
    try:
        raise ValueError("7 rows")
    except ValueError as error:
        whole = logged(formatter, logging.ERROR, "not handled", error)
    assert error_line([*whole, *logged(formatter, logging.ERROR, "failed: ValueError: 7 rows")]) == "ValueError: 7 rows"


def test_a_traceback_without_its_end_does_not_swallow_the_log() -> None:
    torn = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
    info = logged(TextLines(), logging.INFO, "going on")
    assert error_line([*torn, *info, "bye"]) == "bye"


def test_of_a_program_that_says_little_it_is_the_last_line() -> None:
    assert error_line(["begins", "broken on purpose", ""]) == "broken on purpose"
    assert error_line([]) == "" and error_line(["", "  "]) == ""


def test_what_is_kept_is_bounded() -> None:
    assert len(error_line(["x" * 10_000])) == MAX_ERROR_CHARS
    assert last_lines([*map(str, range(50)), "", " "]) == [str(n) for n in range(40, 50)]


@given(st.text(max_size=300))
def test_any_line_has_an_error_in_one_line(text: str) -> None:
    assert len(error_line(text.splitlines()).splitlines()) <= 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("IndexError: index 17 is out of range 16", "IndexError: index 3 is out of range 16", True),
        ("<Net at 0x7f12ab> has no len", "<Net at 0x90ffee> has no len", True),
        ("process 9dd40b1da071fc6c is gone", "process 86cba85f37bee35c is gone", True),
        ("NameError: name 'lss' is not defined", "NameError: name 'los' is not defined", False),
        ("KeyError: 'a'", "ValueError: 'a'", False),
    ],
)
def test_errors_that_differ_in_numbers_alone_are_the_same(one: str, other: str, same: bool) -> None:
    assert (normal_form(one) == normal_form(other)) is same


def test_errors_are_counted_for_each_place_and_kind_alone() -> None:
    errors = RepeatedErrors()
    assert [errors.add("a", "x 1"), errors.add("b", "x 2"), errors.add("a", "y"), errors.add("a", "x 3")] == [
        1,
        1,
        1,
        2,
    ]
    assert errors.add("a", "") == 0
    assert errors.add("a", "x 4") == SAME_ERRORS
    errors.clear()
    assert errors.add("a", "x 5") == 1


def test_a_program_that_never_fails_alike_takes_no_more_and_more_memory() -> None:
    errors = RepeatedErrors()
    for n in range(5 * MAX_KINDS):
        assert errors.add("a", "x" * (n + 1)) == 1
    assert sum(len(counts) for counts in errors._counts.values()) <= MAX_KINDS
