"""Questions: which document has a name; or those that follow references from class to class, over several documents."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.envs.search.documents import ClassEntry, Document


@dataclass(frozen=True)
class Question:
    """`evidence` are the documents that the way leads through, the last one with the answer.

    A question without hops asks for the document itself, and has nothing else to cite.
    """

    start: str
    hops: int
    answer: str
    evidence: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.hops == 0:
            return f"Which module has {self.start}?"
        return (
            f"Start at the class {self.start} and go up {self.hops} times, to what it derives from each time. "
            "Which method is the first that is described there, of those that do not begin with an underscore? Answer "
            "with its name, and cite the documents of all classes on the way."
        )


def make_lookups(documents: Sequence[Document], shortest: int, longest: int) -> list[Question]:
    """All questions without hops, about names of `shortest` to `longest` characters that one document alone has."""
    holders = Counter(name for document in documents for name in document.names)
    return [
        Question(name, 0, document.name, ())
        for document in documents
        for name in sorted(document.names)
        if holders[name] == 1 and shortest <= len(name) <= longest
    ]


def make_questions(documents: Sequence[Document], most_hops: int) -> list[Question]:
    """All questions of up to `most_hops` hops whose way leads into another document, in a stable order."""
    by_name = {document.name: document for document in documents}
    questions = []
    for document in documents:
        for entry in document.classes.values():
            for hops, (way, last) in enumerate(_ways(document.name, entry, by_name), start=1):
                if hops > most_hops:
                    break
                if last.method is not None and len(set(way)) > 1:
                    evidence = tuple(dict.fromkeys(way))
                    questions.append(Question(f"{document.name}.{entry.name}", hops, last.method, evidence))
    return questions


def _ways(module: str, entry: ClassEntry, documents: dict[str, Document]) -> Iterator[tuple[list[str], ClassEntry]]:
    """Yield the documents passed and the class reached after one step up, two steps, and so on."""
    way, seen = [module], {(module, entry.name)}
    while entry.base is not None:
        module, _, name = entry.base.rpartition(".")
        if module not in documents or name not in documents[module].classes or (module, name) in seen:
            return
        seen.add((module, name))
        way = [*way, module]
        entry = documents[module].classes[name]
        yield way, entry
