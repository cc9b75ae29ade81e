"""A full-text index of documents in SQLite (FTS5): search, read, find."""

import re
import sqlite3
import threading
from collections.abc import Iterable

from headway.base.errors import HeadwayError
from headway.envs.search.documents import Document

SHOWN_LINES = 60
MOST_HITS = 5
PASSAGE = 24
MOST_WORDS = 100
"""Words of a query that count."""
MOST_FOUND = 10
_AROUND = 2
"""Lines that follow a line that was found, and are shown with it."""


class Index:
    """Documents by name. Tools call it from threads, one at a time.

    A search gives up to `hits` documents, each with a passage of `passage` words; 0 leaves passages out.
    """

    def __init__(self, documents: Iterable[Document], hits: int = MOST_HITS, passage: int = PASSAGE) -> None:
        """Raises HeadwayError where Python's SQLite lacks FTS5."""
        self._lock = threading.Lock()
        self._hits, self._passage = hits, passage
        documents = list(documents)
        self._lines = {document.name: document.text.splitlines() for document in documents}
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute(
                "create virtual table documents using fts5(name, text, tokenize = 'porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise HeadwayError(f"the SQLite of this Python has no full-text search (FTS5): {error}") from error
        self._database.execute("create table definitions (word text, document text)")
        rows = [(document.name, document.text) for document in documents]
        self._database.executemany("insert into documents values (?, ?)", rows)
        defined = [(word, document.name) for document in documents for word in document.names]
        self._database.executemany("insert into definitions values (?, ?)", defined)

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def search(self, query: str) -> str:
        """Name the documents that fit best, each with the passage that fits."""
        words = re.findall(r"\w+", query)[:MOST_WORDS]
        if not words:
            return "error: the query has no words"
        # Quoted, since words such as AND and NEAR mean something to FTS5.
        match = " OR ".join(f'"{word}"' for word in words)
        # Documents that define a word of the query come before those that only speak of it.
        sql = (
            "select name, snippet(documents, 1, '', '', ' … ', ?) from documents where documents match ? order by "
            f"name in (select document from definitions where word in ({', '.join('?' * len(words))})) desc, "
            "bm25(documents, 4.0, 1.0), name limit ?"
        )
        with self._lock:
            rows = self._database.execute(sql, (max(1, self._passage), match, *words, self._hits)).fetchall()
        passages = [f": {' '.join(text.split())}" if self._passage else "" for _, text in rows]
        return "\n".join(f"{row[0]}{text}" for row, text in zip(rows, passages, strict=True)) or "nothing was found"

    def open(self, name: str, line: int) -> str:
        """Show a document from a line on."""
        lines = self._lines[name]
        first = min(max(1, line), max(1, len(lines)))
        shown = lines[first - 1 : first - 1 + SHOWN_LINES]
        head = f"{name}, lines {first} to {first + len(shown) - 1} of {len(lines)}"
        return "\n".join([head, *shown])

    def find(self, name: str, text: str) -> str:
        """Show the lines that hold a text, with their numbers."""
        lines = self._lines[name]
        places = [i for i, line in enumerate(lines) if text.lower() in line.lower()]
        found = [
            "\n".join(f"{number + 1}: {lines[number]}" for number in range(i, min(len(lines), i + 1 + _AROUND)))
            for i in places[:MOST_FOUND]
        ]
        more = [f"[{len(places) - MOST_FOUND} more]"] if len(places) > MOST_FOUND else []
        return "\n--\n".join([*found, *more]) or f"{name} does not hold this text"

    def close(self) -> None:
        self._database.close()
