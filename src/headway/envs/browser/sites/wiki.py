"""A wiki whose links are followed from article to article; the last one is to be put on the watch list."""

from html import escape

from headway.envs.browser.site import Request, Response, Site, link, not_found, page, redirect
from headway.envs.browser.sites.words import CITIES, FAMILY, GIVEN, RIVERS

CITIES_SHOWN = 8


class Wiki(Site):
    """Start at a river, go on to a city and to a person, and watch the article that is reached."""

    name = "wiki"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        cities = self.random.sample(CITIES, CITIES_SHOWN)
        people = self.random.sample([f"{given} {family}" for given in GIVEN for family in FAMILY], 2 * CITIES_SHOWN)
        self.facts: dict[str, dict[str, str]] = {}
        for number, city in enumerate(cities):
            mayor, architect = people[2 * number], people[2 * number + 1]
            twin = self.random.choice([other for other in cities if other != city])
            self.facts[city] = {"mayor": mayor, "architect of the bridge": architect, "twin city": twin}
            self.facts[mayor] = {"birthplace": self.random.choice(cities)}
            self.facts[architect] = {"birthplace": self.random.choice(cities)}
        self.rivers = [f"River {name}" for name in RIVERS]
        for river in self.rivers:
            source, mouth = self.random.sample(cities, 2)
            self.facts[river] = {"city at the source": source, "city at the mouth": mouth}
        self.watched: set[str] = set()
        self._set_task()

    def _set_task(self) -> None:
        river = self.random.choice(self.rivers)
        steps = [self.random.choice(("city at the source", "city at the mouth"))]
        steps += self.random.choice(([], ["twin city"]))
        steps.append(self.random.choice(("mayor", "architect of the bridge")))
        self.target = river
        for step in steps:
            self.target = self.facts[self.target][step]
        self.goal = (
            f"Start at the article “{river}” and follow, one after the other: {', '.join(steps)}. Put the article that "
            "you reach on the watch list, and no other."
        )

    def handle(self, request: Request) -> Response:
        match request.method, request.path.strip("/").split("/"):
            case "GET", [""]:
                listed = "".join(f"<li>{link(_path(river), river)}</li>" for river in self.rivers)
                return page("All rivers", f"<ul>{listed}</ul>")
            case "GET", ["article", name] if (title := name.replace("_", " ")) in self.facts:
                return self._article(title)
            case "POST", ["watch", name] if (title := name.replace("_", " ")) in self.facts:
                (self.watched.discard if title in self.watched else self.watched.add)(title)
                return redirect(_path(title))
        return not_found()

    def progress(self) -> float:
        return float(self.watched == {self.target})

    def _article(self, title: str) -> Response:
        told = self.facts[title].items()
        facts = "".join(f"<dt>{escape(fact)}</dt><dd>{link(_path(to), to)}</dd>" for fact, to in told)
        verb = "Stop watching" if title in self.watched else "Watch"
        return page(
            title,
            f"<nav>{link('/', 'All rivers')}</nav><p>{escape(title)} is an article of this wiki.</p><dl>{facts}</dl>",
            f'<form method=post action="{_path(title, "watch")}"><button>{verb} this article</button></form>',
        )


def _path(title: str, verb: str = "article") -> str:
    return f"/{verb}/{title.replace(' ', '_')}"
