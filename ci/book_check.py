#!/usr/bin/env python3
"""Checks the pages of docs/, and the book that mdBook has made of them.

    book_check.py BOOK    the folder of the built book
    book_check.py --self-test

- Every page of docs/ is in SUMMARY.md.
- Every relative link of a Markdown file leads to a file of the repository, and its anchor to a heading there. So does every
  link within the book's HTML.
- Every environment variable that the code reads is in docs/settings.md, and the other way round.
- Every kind of error is in docs/python.md, which is the reference of errors.
- For each question of QUESTIONS, the book's search finds the page that answers it first (with node, as a browser runs it).
"""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *(```+|~~~+)")
HEADING = re.compile(r"^(#{1,6}) +(.*?) *#* *$")

# How code names a variable: a string, or a shell's expansion.
STRING = re.compile(r"""["'](MULTIRAIL_[A-Z][A-Z0-9_]*)["'=]""")
EXPANSION = re.compile(r"\$\{?(MULTIRAIL_[A-Z][A-Z0-9_]*)")
SETTING = re.compile(r"\bMULTIRAIL_[A-Z][A-Z0-9_]*")
# Variables whose names are made of a prefix and a parameter's name.
PREFIXES = ("MULTIRAIL_NIXL_",)
# Strings that are names of a back end of NIXL and of a transport of Ray, in tests.
OTHER_NAMES = {"MULTIRAIL_NULL", "MULTIRAIL_NUMPY"}

# What people type, and the page (and heading) that has the answer. These are not the words of the headings.
QUESTIONS = {
    "put it under vLLM or SGLang that I run today and take it out": "questions.html#use-it-under-vllm",
    "know that RDMA is used and not TCP": "questions.html#is-rdma-or-nvlink-really-used",
    "kubernetes p5 device plugin limits huge pages security context": "questions.html#run-it-on-kubernetes",
    "slurm sbatch": "deploy.html#slurm",
    "ports security group firewall": "questions.html#which-ports",
    "why was my torch tensor refused": "questions.html#hand-it-a-torch-tensor",
    "what happens when a peer card cable or host dies": "questions.html#what-i-see",
    "which versions work together upgrade fleet": "questions.html#which-versions-work",
    "how many peers and regions can one process have": "questions.html#how-many-peers",
    "choose queue pairs rails gpu blocks window page size": "questions.html#queue-pairs",
    "workers find each other without addresses": "questions.html#how-workers-find",
    "who can write once connected keep strangers out": "questions.html#who-can-write",
    "transfer is slow what to look at first": "questions.html#a-transfer-is-slow",
    "kv cache prefill decode": "recipes.html#hand-a-kv-cache",
    "broadcast weights to all workers": "recipes.html#send-new-weights",
    "prometheus grafana dashboard": "observability.html#prometheus-and-grafana",
    "etcd redis directory of peers": "discovery.html",
    "systemd service": "deploy.html#a-system-service",
    "dockerfile container image": "deploy.html#containers",
    "take a device out of service": "observability.html#devices-out-of-service",
    "MULTIRAIL_BACKEND": "settings.html#which-backend",
}


def slug(heading, seen):
    """The anchor of a heading on GitHub and in mdBook."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    count = seen.get(text, 0)
    seen[text] = count + 1
    return f"{text}-{count}" if count else text


def parse(path):
    """The links and anchors of a Markdown file, outside of code."""
    links, anchors, seen, fence = [], set(), {}, None
    for line in path.read_text(encoding="utf-8").splitlines():
        mark = FENCE.match(line)
        if mark and fence is None:
            fence = mark[1]
            continue
        if fence is not None:
            if mark and mark[1].startswith(fence):
                fence = None
            continue
        heading = HEADING.match(line)
        if heading:
            anchors.add(slug(heading[2], seen))
        text = re.sub(r"`[^`]*`", "", line)
        links += LINK.findall(text) + LINK.findall(line) + IMAGE.findall(text)
    return list(dict.fromkeys(links)), anchors


def tracked(*patterns):
    """Files of the repository, also those that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for path in map(pathlib.Path, names) if path.exists()]


def broken_links(pages):
    """Links that lead nowhere, one line each."""
    parsed = {page.resolve(): parse(page) for page in pages}
    for page in pages:
        for link in parsed[page.resolve()][0]:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page.resolve()
            if not target.exists():
                yield f"{page}: {link}: no such file"
            elif url.fragment and target in parsed and url.fragment not in parsed[target][1]:
                yield f"{page}: {link}: no such heading"


class Anchors(html.parser.HTMLParser):
    """The links and the anchors of a page of the book."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            if (tag == "a" and name == "href") or (tag == "img" and name == "src"):
                self.links.add(value)


def broken_html(book):
    """Links within the book that lead nowhere."""
    # print.html has all chapters on one page, whose links are the chapters' own.
    pages = [page for page in book.rglob("*.html") if page.name not in ("print.html", "toc.html", "404.html")]
    parsed = {page.resolve(): Anchors(page.read_text(encoding="utf-8")) for page in pages}
    for page in pages:
        for link in parsed[page.resolve()].links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page.resolve()
            if not target.exists():
                yield f"{page.relative_to(book)}: {link}: no such page"
            elif url.fragment and target in parsed and urllib.parse.unquote(url.fragment) not in parsed[target].anchors:
                yield f"{page.relative_to(book)}: {link}: no such heading"


def settings_faults(code, page):
    """Variables of the code that the page does not have, and the other way round. `code` has pairs of path and text."""
    read = {}
    for path, text in code:
        for name in STRING.findall(text) + EXPANSION.findall(text):
            if name not in OTHER_NAMES:
                read.setdefault(name, path)
    written = set(SETTING.findall(page))
    for name, path in sorted(read.items()):
        if name not in written and not name.startswith(PREFIXES):
            yield f"{path} reads {name}: docs/settings.md does not have it"
    for name in sorted(written - set(read)):
        if name not in PREFIXES and not name.startswith(PREFIXES):
            yield f"docs/settings.md has {name}: no code reads it"


def kind_faults(enum, page):
    """Kinds of errors that the page does not have."""
    body = enum.split("pub enum ErrorKind {", 1)[1].split("\n}", 1)[0]
    kinds = re.findall(r"^    ([A-Z][A-Za-z]*),$", body, re.MULTILINE)
    assert len(kinds) >= 20, kinds
    return [f"docs/python.md has no kind of error {kind}" for kind in kinds if f"`{kind}`" not in page]


# As mdBook's searcher.js does it: the index, and its options, from the built file.
SEARCH = """
const fs = require("fs"), vm = require("vm"), [book, questions] = [process.argv[1], JSON.parse(process.argv[2])];
const file = (start) => book + "/" + fs.readdirSync(book).find((n) => n.startsWith(start) && n.endsWith(".js"));
const context = { window: { search: {}, elasticlunr: null }, self: {}, console };
vm.createContext(context);
context.window.window = context.window;
vm.runInContext(fs.readFileSync(file("elasticlunr"), "utf8"), context);
vm.runInContext(fs.readFileSync(file("searchindex"), "utf8"), context);
const config = context.window.search;
const index = (context.elasticlunr || context.window.elasticlunr).Index.load(config.index);
const found = {};
for (const question of questions) {
    const results = index.search(question, config.search_options);
    found[question] = results.slice(0, 3).map((result) => config.doc_urls[result.ref]);
}
console.log(JSON.stringify(found));
"""


def search_faults(book):
    """Questions whose answer the search does not find first."""
    if shutil.which("node") is None:
        subprocess.run(["ci/skipped", "the book's search", "node is not installed"], check=True)
        return
    command = ["node", "-e", SEARCH, str(book), json.dumps(list(QUESTIONS))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for question, page in QUESTIONS.items():
        if not found[question] or not found[question][0].startswith(page):
            yield f"search for {question!r}: {page} is not the first of {found[question]}"
    print(f"book: the search finds the answers of {len(QUESTIONS)} questions first")


def self_test():
    """Shows that each check finds a fault."""
    seen = {}
    assert [slug(text, seen) for text in ("A `b`: [c](d)!", "On a p5.48xlarge", "Pages", "Pages")] == [
        "a-b-c",
        "on-a-p548xlarge",
        "pages",
        "pages-1",
    ]
    page = "`MULTIRAIL_A`, `MULTIRAIL_NIXL_`, `MULTIRAIL_GONE`"
    code = [("a.rs", 'var("MULTIRAIL_A")'), ("b", "${MULTIRAIL_B:-1} MULTIRAIL_H"), ("c.py", "'MULTIRAIL_NIXL_X'")]
    assert [fault.split()[-6:] for fault in settings_faults(code, page)] == [
        "MULTIRAIL_B: docs/settings.md does not have it".split(),
        "has MULTIRAIL_GONE: no code reads it".split(),
    ]
    print("book: the checks find their faults")


def main():
    if sys.argv[1:] == ["--self-test"]:
        self_test()
        return
    book = pathlib.Path(sys.argv[1])
    docs = pathlib.Path("docs")
    faults = []
    summary = set(parse(docs / "SUMMARY.md")[0])
    pages = sorted(docs.rglob("*.md"))
    for page in pages:
        name = str(page.relative_to(docs))
        if name != "SUMMARY.md" and name not in summary:
            faults.append(f"docs/SUMMARY.md does not have {name}")
    faults += broken_links(tracked("*.md"))
    faults += broken_html(book)
    sources = tracked("*.rs", "*.py", "*.cpp", "*.h", "*.c", "*.sbatch", "*.service", "*.yaml", "ci", ".ci", "capi", "integrations")
    code = [
        (path, path.read_text(encoding="utf-8", errors="ignore"))
        for path in sources
        if path.suffix not in (".md", ".json", ".svg") and path != pathlib.Path("ci/book_check.py")
    ]
    faults += settings_faults(code, (docs / "settings.md").read_text(encoding="utf-8"))
    enum = pathlib.Path("transport-core/spi/src/error.rs").read_text(encoding="utf-8")
    faults += kind_faults(enum, (docs / "python.md").read_text(encoding="utf-8"))
    faults += search_faults(book)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"book: {len(pages)} pages, {len(code)} files with variables, no broken link")


main()
