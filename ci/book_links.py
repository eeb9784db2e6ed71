#!/usr/bin/env python3
"""A preprocessor of mdBook: links to files outside of docs/ lead to the repository.

mdBook calls it with `supports RENDERER`, or with [context, book] as JSON on stdin, and reads the book from stdout.
"""

import json
import posixpath
import re
import sys

REPOSITORY = "https://github.com/multirail/multirail/blob/main/"
LINK = re.compile(r"(\]\()(\.\./[^)\s]*)(\))")


def rewrite(text, path):
    """Replaces links that leave docs/."""

    def target(link):
        whole = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), link[2]))
        outside = not whole.startswith("docs/")
        return f"{link[1]}{REPOSITORY}{whole}{link[3]}" if outside else link[0]

    return LINK.sub(target, text)


def walk(items):
    """Rewrites chapters and their sub-chapters."""
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            if chapter.get("path"):
                chapter["content"] = rewrite(chapter["content"], chapter["path"])
            walk(chapter["sub_items"])


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    _context, book = json.load(sys.stdin)
    walk(book.get("items", book.get("sections", [])))
    json.dump(book, sys.stdout)


main()
