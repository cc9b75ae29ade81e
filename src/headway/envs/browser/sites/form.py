"""A form to fill in: text, a choice from a list, one of several, and a box to tick."""

from html import escape

from headway.envs.browser.site import Request, Response, Site, not_found, page
from headway.envs.browser.sites.words import COUNTRIES, FAMILY, GIVEN

PLANS = ("Basic", "Family", "Business")


class Form(Site):
    """Register one person with exactly these details."""

    name = "form"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        given, family = self.random.choice(GIVEN), self.random.choice(FAMILY)
        number = self.random.randint(10, 99)
        self.wanted = {
            "name": f"{given} {family}",
            "email": f"{given.lower()}{number}@example.org",
            "country": self.random.choice(COUNTRIES),
            "plan": self.random.choice(PLANS),
            "news": self.random.choice(("yes", "no")),
        }
        self.records: list[dict[str, str]] = []
        letters = "with" if self.wanted["news"] == "yes" else "without"
        self.goal = (
            f"Register {self.wanted['name']} from {self.wanted['country']} with the e-mail address "
            f"{self.wanted['email']} for the plan {self.wanted['plan']}, {letters} the newsletter."
        )

    def handle(self, request: Request) -> Response:
        match request.method, request.path:
            case "GET", "/":
                return self._form({}, "")
            case "POST", "/register":
                return self._register(request)
        return not_found()

    def progress(self) -> float:
        if len(self.records) != 1:
            return 0.0
        return sum(self.records[0][key] == value for key, value in self.wanted.items()) / len(self.wanted)

    def _register(self, request: Request) -> Response:
        record = {key: request.form.get(key, "").strip() for key in self.wanted}
        record["news"] = record["news"] or "no"
        missing = [key for key, value in record.items() if not value]
        if missing or "@" not in record["email"]:
            return self._form(record, f"Please fill in: {', '.join(missing) or 'a valid e-mail address'}.")
        self.records.append(record)
        return page("Registration received", f"<p>We have registered {escape(record['name'])}.</p>")

    def _form(self, filled: dict[str, str], problem: str) -> Response:
        told = f"<p role=alert>{escape(problem)}</p>" if problem else ""
        countries = "".join(
            f"<option{' selected' if filled.get('country') == c else ''}>{c}</option>" for c in ("", *COUNTRIES)
        )
        plans = "".join(
            f"<label><input type=radio name=plan value={p}{' checked' if filled.get('plan') == p else ''}> {p}</label>"
            for p in PLANS
        )
        ticked = " checked" if filled.get("news") == "yes" else ""
        return page(
            "Registration",
            told,
            "<form method=post action=/register>",
            f'<p><label>Name <input name=name value="{escape(filled.get("name", ""))}"></label></p>',
            f'<p><label>E-mail <input name=email value="{escape(filled.get("email", ""))}"></label></p>',
            f"<p><label>Country <select name=country>{countries}</select></label></p>",
            f"<fieldset><legend>Plan</legend>{plans}</fieldset>",
            f"<p><label><input type=checkbox name=news value=yes{ticked}> Send me the newsletter</label></p>",
            "<p><button>Register</button></p></form>",
            status=422 if problem else 200,
        )
