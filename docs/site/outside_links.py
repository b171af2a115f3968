"""A hook of mkdocs: links from docs/ to other files of the repository.

GitHub shows those files, the site does not. On the site such a link becomes its text and the file's
path. A link to a file that is missing is a warning, which ``mkdocs build --strict`` counts as an
error.
"""

import logging
import re
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.outside_links")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text without links that lead out of the folder of documents."""
    docs = Path(config.docs_dir).resolve()
    folder = Path(page.file.abs_src_path).resolve().parent

    def plain(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            LOG.warning("%s links to %s, which is missing", page.file.src_uri, link[2])
        path = target.relative_to(docs.parent).as_posix()
        return link[1] if link[1] == path else f"{link[1]} (`{path}`)"

    return LINK.sub(plain, markdown)
