"""What MkDocs does for the site beyond its configuration, so that one set of pages serves both it and the repository.

Pages link to files of the repository. Those outside docs/ become pages of the site too, with links put right; ```math
fences become MathML, which needs no script; and a page that would load something from a network ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)")
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"https?:|<link\b[^>]*stylesheet[^>]*\shref=\"https?:")
LANGUAGES = {".py": "python", ".sh": "bash"}

# Pages of the site that are files of the repository outside docs/, and where their links are resolved.
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# Where links to what is no page go.
ELSEWHERE = {"examples": "examples.md", "benchmarks/results": "benchmarks.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Reads ```math fences as TeX, and names headings as GitHub does."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": _mathematics})
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def _mathematics(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{convert(source, display="block")}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside docs/, and the files that pages link to."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    linked = {target for file in files.documentation_pages() for target in _targets(file)}
    for path in sorted(linked):
        if (ROOT / path).is_file() and _page(path) not in files.src_uris:
            files.append(
                File.generated(config, _page(path), content=_listing(path), inclusion=InclusionLevel.NOT_IN_NAV)
            )
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links between files of the repository into links between pages."""
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: posixpath.relpath(_page(_target(page.file, link[1])), here or "."), markdown)


def _targets(file: File) -> set[str]:
    return {_target(file, link) for link in LINK.findall(file.content_string)}


def _target(file: File, link: str) -> str:
    """The file of the repository that a link in a page leads to."""
    origin = OUTSIDE.get(file.src_uri, f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _page(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    pages = {own: uri for uri, own in OUTSIDE.items()} | ELSEWHERE
    if path in pages:
        return pages[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}.md"


def _listing(path: str) -> str:
    """A page that shows a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n~~~~\n"


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuses a page that needs a network to be shown."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from a network: {found[0]}")
    return output
