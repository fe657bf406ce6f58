"""A gymnasium of links: what they do to learners, each beside what the link itself would need.

Real programs on this machine: a syncer, one learner beside it, and a newcomer behind a link (bench/relay.py) that is
slow or far, breaks, falls silent or stops, or of whose host one address is dead. Then a learner that joins and is lost
every ten seconds, many learners that join at once under ``ulimit -n 1024`` while connections are reset, and a learner
that was stopped. Learners have no model (lab/gymnasium/stand_in.py): their connections and transfers are the product's.

    python bench/links.py                   all, some 40 minutes
    python bench/links.py --only '8 Mbit/s'
    python bench/links.py --quick           small models, short times

For each link: seconds until an update of the newcomer is merged, beside those that the bytes and round trips take on
that link; the bytes that it carried down by then, beside those of the model; and what a user was told meanwhile. Exit
code 1: a learner was not merged in ten times its link's time, or the books of a run did not balance.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import sys
from collections.abc import Sequence
from functools import partial

import common
from diloco.console import print_text
from lab.gymnasium.courses import Course, CourseFailed, Result, courses
from lab.progress import Progress


def rows_of(result: Result) -> list[dict[str, object]]:
    """A row for each figure of a course."""
    return [
        {
            "name": f"{result.name}: {one.name}",
            "value": one.value,
            "unit": one.unit,
            "against": one.against,
            "baseline": one.baseline,
            "ratio": one.value / one.baseline if one.baseline else None,
        }
        for one in result.figures
    ]


def text_of(results: Sequence[Result]) -> str:
    """For people: each course's figures, and what was told."""
    lines = []
    for result in results:
        lines.append(result.name)
        for one in result.figures:
            beside = "" if one.baseline is None else f"  ({one.against}: {one.baseline:.3g} {one.unit})"
            lines.append(f"  {one.name:<42} {one.value:10.3g} {one.unit}{beside}")
        lines += [f"  told: {sentence}" for sentence in result.told]
    return "\n".join(lines)


async def run(chosen: Sequence[Course]) -> tuple[list[Result], list[str]]:
    """What was found, and which courses failed, in words."""
    results, failures = [], []
    progress = Progress("links")
    for n, course in enumerate(chosen):
        progress.advance(n / len(chosen))
        try:
            results.append(await course.run())
        except CourseFailed as error:
            failures.append(f"{course.name}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
    return results, failures


def main(arguments: Sequence[str]) -> int:
    """0; 1: a course failed."""
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="courses of that name, such as '* Mbit/s'")
    parser.add_argument("--list", action="store_true", help="name the courses")
    given = parser.parse_args(arguments)
    chosen = [one for one in courses(given.quick) if fnmatch.fnmatch(one.name, given.only)]
    if given.list or not chosen:
        print_text("\n".join(one.name for one in courses(given.quick)))
        return 0 if given.list else 2
    results, failures = asyncio.run(run(chosen))
    rows = [row for result in results for row in rows_of(result)]
    told = {result.name: list(result.told) for result in results}
    document = {"rows": rows, "title": "links", "told": told, "failed": failures}
    print_text(json.dumps(document) if given.json else text_of(results))
    return 1 if failures else 0


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
