"""What mkdocs (mkdocs.yml) does beside its own: pages and files outside of docs/, and no word to other hosts.

Pages of docs/ link to the README, to examples and to sources. On a repository's pages such links lead
somewhere; in a site of docs/ alone they would not. So every file that a page links to becomes part of the
site: Markdown as a page below ``repository/``, anything else as it is below ``files/``, a folder as a list of
its files. mkdocs then checks these links like all others.

The site loads nothing from another host, neither when it is built nor when it is read: `on_post_build` looks
at every page for a script, style sheet, font, picture or frame that would be.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *```.*?^ *```\n?", re.S | re.M)
# Parts of a page that a browser fetches by itself: links that a reader follows are not among them.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|alternate|prev|next))[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|class=[\"']mermaid[\"'][^>]*"  # the theme has a diagram drawn by a program that it fetches
    r"|@import\s+(?:url\()?[\"']?(?:https?:)?//[^\s\"')]+|url\([\"']?(?:https?:)?//[^\s\"')]+",
    re.I,
)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` made of each of its parts that is no block of code."""
    parts, at = [], 0
    for code in FENCE.finditer(text):
        parts += [change(text[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def place_in_site(path: str) -> str:
    """Where a file of the repository lies in the site: ``docs/x.md`` → ``x.md``, ``a/b.py`` → ``files/a/b.py``."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"repository/{path}" if path.endswith(".md") else f"files/{path}"


def place_in_repository(src_uri: str) -> str:
    """The other way round, for a page."""
    for folder in ("repository/", "files/"):
        if src_uri.startswith(folder):
            return src_uri.removeprefix(folder)
    return f"docs/{src_uri}"


def targets(path: str, text: str) -> Iterator[str]:
    """The files and folders of the repository that the page at ``path`` links to, as far as they are there."""
    for _, target, _ in LINK.findall(FENCE.sub("", text)):
        if target and ":" not in target:
            found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if not found.startswith("..") and (ROOT / found).exists():
                yield found


def with_links_of_the_site(path: str, text: str) -> str:
    """The page at ``path`` with its links as they must be at its place in the site."""
    here = posixpath.dirname(place_in_site(path))

    def moved(match: re.Match[str]) -> str:
        words, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if not target or ":" in target:
            return match.group()
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if found.startswith("..") or not (ROOT / found).exists():
            return match.group()  # mkdocs says that it leads nowhere
        return f"{words}({posixpath.relpath(place_in_site(found), here or '.')}{anchor})"

    return outside_code(text, lambda prose: LINK.sub(moved, prose))


def with_deep_lists(text: str) -> str:
    """Lists within lists are indented by two or three spaces here, and Python-Markdown wants four."""
    return outside_code(text, lambda prose: re.sub(r"^ {2,3}(?=\S)", "    ", prose, flags=re.M))


def listing(folder: str) -> str:
    """A page for a folder that some page links to."""
    names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
    return f"# {folder}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to, and what those link to in turn."""
    from mkdocs.structure.files import File

    def add(path: str) -> str | None:
        """Put one file into the site; a page's text, to be searched for links."""
        place = place_in_site(path)
        if (ROOT / path).is_dir():
            text = listing(path)
            files.append(File.generated(config, place, content=text))
            for name in (entry for entry in (ROOT / path).iterdir() if entry.is_file() and entry.suffix != ".md"):
                if files.get_file_from_path(f"files/{path}/{name.name}") is None:
                    files.append(File.generated(config, f"files/{path}/{name.name}", abs_src_path=str(name)))
            return None
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        return (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else None

    waiting = [(place_in_repository(file.src_uri), file.content_string) for file in files.documentation_pages()]
    while waiting:
        path, text = waiting.pop()
        for target in targets(path, text):
            if target.startswith("docs/") or files.get_file_from_path(place_in_site(target)) is not None:
                continue
            if (more := add(target)) is not None:
                waiting.append((target, more))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links and lists of a page as mkdocs wants them."""
    path = place_in_repository(page.file.src_uri)
    if (ROOT / path).is_dir() or page.file.src_uri.endswith("/index.md"):
        return markdown  # a listing
    return with_deep_lists(with_links_of_the_site(path, markdown))


def on_post_build(config: Any) -> None:
    """Raise where a page would have a browser ask another host for something."""
    from mkdocs.exceptions import PluginError

    site = Path(config["site_dir"])
    for page in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        if found := FETCHED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} would fetch from another host: {found.group()[:200]}")
