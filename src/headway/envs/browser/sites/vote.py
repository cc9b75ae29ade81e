"""A vote: one button for each candidate, counted by the page's own script. The smallest of the sites."""

from headway.envs.browser.site import Request, Response, Site, not_found, page
from headway.envs.browser.sites.words import GIVEN

CANDIDATES = 4
PLACES = ("first", "second", "third", "fourth")

_SCRIPT = """<script>
document.body.addEventListener("click", async (event) => {
  if (event.target.tagName !== "BUTTON") return;
  const answer = await fetch("/vote", {method: "POST", body: new URLSearchParams({name: event.target.textContent})});
  if (answer.ok) document.querySelector("ul").replaceWith("Thank you.");
});
</script>"""


class Vote(Site):
    """Vote once, for the candidate at the place that is asked for."""

    name = "vote"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.candidates = self.random.sample(GIVEN, CANDIDATES)
        place = self.random.randrange(CANDIDATES)
        self.wanted = self.candidates[place]
        self.votes: list[str] = []
        self.goal = f"Vote for the {PLACES[place]} candidate."

    def handle(self, request: Request) -> Response:
        match request.method, request.path:
            case "GET", "/":
                buttons = "".join(f"<li><button>{name}</button></li>" for name in self.candidates)
                return page("Vote", f"<ul>{buttons}</ul>{_SCRIPT}")
            case "POST", "/vote" if request.form.get("name") in self.candidates:
                self.votes.append(request.form["name"])
                return Response("counted")
        return not_found()

    @property
    def looks(self) -> tuple[str, str]:
        """The page before and after a vote, as a browser shows it as plain text: demonstrations need no browser."""
        buttons = [f'[{number}] button "{name}"' for number, name in enumerate(self.candidates, start=1)]
        head = 'page "Vote" at /\nVote'
        return "\n".join([head, *buttons]), f"{head}\nThank you."

    def progress(self) -> float:
        return float(self.votes == [self.wanted])
